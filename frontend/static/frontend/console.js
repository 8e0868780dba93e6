// The console's behavior. Everything here is also reachable without it: links are links, forms are forms.
"use strict";
const root = document.documentElement;
const $ = (selector, within = document) => within.querySelector(selector);
const on = (type, act, target = document) => target.addEventListener(type, act);
const year = 60 * 60 * 24 * 365;

// Theme, time zone, keys: the theme changes at once, the rest with the page the form leads to.
on("click", (event) => {
  const button = event.target.closest("[data-preferences] button");
  if (!button) return;
  if (button.value === "local") button.value = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  if (button.name !== "theme") return;
  event.preventDefault();
  document.cookie = `theme=${button.value};path=/;max-age=${year};samesite=lax`;
  if (button.value === "system") delete root.dataset.theme;
  else root.dataset.theme = button.value;
  for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
  root.dispatchEvent(new Event("themed"));
});

// Menus close when something else is used.
const closeMenus = (but) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(but)) menu.open = false;
};
on("click", (event) => closeMenus(event.target));
on("focusin", (event) => closeMenus(event.target));

// Dialogs and the drawer show what was put into them, and close by Esc, outside, or [data-close]. A form that comes
// back has the focus on what is wrong.
on("htmx:afterSwap", ({ detail: { target } }) => {
  if (target.localName !== "dialog") return;
  if (target.open) return ($("[aria-invalid=true]", target) || $("[type=submit]", target))?.focus();
  target.showModal();
  const title = $("h1", target);
  if (title) target.setAttribute("aria-label", title.textContent);
});
on("click", (event) => {
  const dialog = event.target.closest("dialog");
  if (!dialog) return;
  if (event.target !== dialog && !event.target.closest("[data-close]")) return;
  event.preventDefault();
  dialog.close();
});
for (const dialog of document.querySelectorAll("dialog")) on("close", () => dialog.id !== "palette" && dialog.replaceChildren(), dialog);

// Panels: no refresh while nobody looks or somebody is inside; one that says the same is left alone.
const last = new WeakMap();
on("htmx:beforeRequest", (event) => {
  const { elt, requestConfig } = event.detail;
  if (!elt.matches(".panel") || requestConfig.triggeringEvent?.type === "load") return;
  if (document.hidden || elt.contains(document.activeElement) || $("details[open]", elt)) event.preventDefault();
});
on("htmx:beforeSwap", (event) => {
  const { target, xhr } = event.detail;
  if (xhr.status >= 500 && !xhr.getResponseHeader("X-Panel")) event.detail.shouldSwap = false;
  if (!target.matches(".panel")) return;
  if (last.get(target) === xhr.responseText) event.detail.shouldSwap = false;
  last.set(target, xhr.responseText);
});
const say = (text) => {
  const toast = document.createElement("p");
  toast.className = "toast error";
  toast.textContent = text;
  $("#toasts").append(toast);
};
on("htmx:responseError", ({ detail: { xhr } }) => {
  if (!xhr.getResponseHeader("X-Panel")) say(`The request failed (${xhr.status}). Try again. Request ID: ${xhr.getResponseHeader("X-Request-Id") || "unknown"}.`);
});
on("htmx:sendError", ({ detail: { elt } }) => elt.matches(".panel") || say("Cannot reach the server. Nothing was changed. Try again."));
on("click", (event) => event.target.closest(".toast")?.remove());
setTimeout(() => document.querySelectorAll(".toast.success").forEach((toast) => toast.remove()), 8000);

// Copying.
on("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy || $("code", button.parentElement).textContent);
  const label = button.getAttribute("aria-label");
  button.setAttribute("aria-label", "Copied");
  button.title = "Copied";
  setTimeout(() => { button.setAttribute("aria-label", label); button.title = "Copy"; }, 2000);
});

// The palette.
const palette = $("#palette");
const link = $("[data-palette]");
const hits = () => [...palette.querySelectorAll(".search-results a")];
let asked = 0;
const point = (step) => {
  const all = hits();
  const at = all.findIndex((hit) => hit.classList.contains("is-selected"));
  all[at]?.classList.remove("is-selected");
  const next = all[(at + step + all.length) % all.length];
  next?.classList.add("is-selected");
  next?.scrollIntoView({ block: "nearest" });
  $("#palette-said", palette).textContent = next ? next.textContent.trim() : "No results";
};
const look = async () => {
  const turn = ++asked;
  const input = $("input", palette);
  const answer = await fetch(`${link.href}?q=${encodeURIComponent(input.value)}`, { headers: { "HX-Request": "true" } });
  if (turn !== asked || !answer.ok) return;
  $(".search-results", palette).innerHTML = await answer.text();
  point(1);
};
const openPalette = () => {
  if (!palette.childElementCount) {
    const form = document.createElement("form");
    form.innerHTML = '<input type="search" aria-label="Name of a screen, key or tenant" placeholder="Search or jump to…" autocomplete="off"><kbd>Esc</kbd>';
    const list = document.createElement("div");
    list.className = "search-results";
    const said = document.createElement("p");
    said.id = "palette-said";
    said.className = "visually-hidden";
    said.setAttribute("role", "status");
    palette.append(form, list, said);
    let wait;
    on("input", () => { clearTimeout(wait); wait = setTimeout(look, 120); }, form);
    on("submit", (event) => { event.preventDefault(); $(".search-results a.is-selected", palette)?.click(); }, form);
    on("keydown", (event) => {
      if (event.key === "Escape") { event.preventDefault(); palette.close(); }
      if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); point(event.key === "ArrowDown" ? 1 : -1); }
    }, form);
  }
  palette.showModal();
  $("input", palette).select();
  look();
};
if (link) on("click", (event) => { event.preventDefault(); openPalette(); }, link);

// Keys: Ctrl K always; `/` and `g` + letter unless switched off, and never while typing.
let after = 0;
on("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && link) {
    event.preventDefault();
    palette.open ? palette.close() : openPalette();
    return;
  }
  const typing = event.target.closest("input, textarea, select, [contenteditable]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]") || !$("[data-letters]")) return;
  if (event.key === "/") {
    event.preventDefault();
    const field = $("[data-search]");
    field ? field.focus() : link && openPalette();
  } else if (event.timeStamp - after < 1500 && /^[a-z]$/.test(event.key)) {
    after = 0;
    $(`[data-letter="${event.key}"]`)?.click();
  } else {
    after = event.key === "g" ? event.timeStamp : 0;
  }
});
