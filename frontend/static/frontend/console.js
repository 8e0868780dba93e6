"use strict";
const root = document.documentElement;
const $ = (selector, within = document) => within.querySelector(selector);
const on = (type, act, target = document) => target.addEventListener(type, act);
const year = 60 * 60 * 24 * 365;
// `make setup` writes window.TEXTS to texts.*.js.
const _ = (text, values = {}) => (window.TEXTS?.[text] || text).replace(/%\((\w+)\)s/g, (found, name) => values[name]);

// The theme changes immediately, the time zone and shortcuts on the next page.
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

// Menus close when another element is used.
const closeMenus = (target) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(target)) menu.open = false;
};
on("click", (event) => closeMenus(event.target));
on("focusin", (event) => closeMenus(event.target));

// Dialogs and the drawer close by Esc, a click outside, or [data-close].
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

// Panels do not refresh while the page is hidden, they have focus, or rows are selected.
const last = new WeakMap();
on("htmx:beforeRequest", (event) => {
  const { elt, requestConfig } = event.detail;
  if (!elt.matches(".panel") || requestConfig.triggeringEvent?.type === "load") return;
  if (document.hidden || elt.contains(document.activeElement) || $("details[open], input:checked", elt)) event.preventDefault();
});
on("htmx:beforeSwap", (event) => {
  const { target, xhr } = event.detail;
  if (xhr.status >= 500 && !xhr.getResponseHeader("X-Panel")) event.detail.shouldSwap = false;
  if (!target.matches(".panel")) return;
  if (last.get(target) === xhr.responseText) event.detail.shouldSwap = false;
  last.set(target, xhr.responseText);
});
const showError = (text) => {
  const toast = document.createElement("p");
  toast.className = "toast error";
  toast.textContent = text;
  $("#toasts").append(toast);
};
on("htmx:responseError", ({ detail: { xhr } }) => {
  if (!xhr.getResponseHeader("X-Panel")) showError(_("The request failed (%(status)s). Try again. Request ID: %(id)s.", { status: xhr.status, id: xhr.getResponseHeader("X-Request-Id") || "–" }));
});
on("htmx:sendError", ({ detail: { elt } }) => elt.matches(".panel") || showError(_("Cannot reach the server. Nothing was changed. Try again.")));
on("click", (event) => event.target.closest(".toast")?.remove());
setTimeout(() => document.querySelectorAll(".toast.success").forEach((toast) => toast.remove()), 5000);

for (const tabs of document.querySelectorAll("[data-tabs]")) {
  const list = $("[role=tablist]", tabs);
  const buttons = [...list.children];
  const choose = (chosen) => {
    for (const button of buttons) {
      const isChosen = button === chosen;
      button.setAttribute("aria-selected", String(isChosen));
      button.tabIndex = isChosen ? 0 : -1;
      const panel = document.getElementById(button.getAttribute("aria-controls"));
      panel.hidden = !isChosen;
    }
  };
  for (const button of buttons) {
    const panel = document.getElementById(button.getAttribute("aria-controls"));
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-labelledby", button.id);
    $("h3", panel)?.remove();
  }
  choose(buttons[0]);
  on("click", (event) => event.target.closest("[role=tab]") && choose(event.target.closest("[role=tab]")), list);
  on("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = buttons[(buttons.indexOf(event.target) + step + buttons.length) % buttons.length];
    choose(next);
    next.focus();
  }, list);
}

// Filter forms apply when a choice changes.
on("change", ({ target }) => target.closest("form[data-auto]")?.requestSubmit());

on("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy || $("code", button.parentElement).textContent);
  const [label, title] = [button.getAttribute("aria-label"), button.title];
  if (title === _("Copied")) return;
  button.setAttribute("aria-label", _("Copied"));
  button.title = _("Copied");
  setTimeout(() => { button.setAttribute("aria-label", label); button.title = title; }, 2000);
});

const palette = $("#palette");
const link = $("[data-palette]");
const results = () => [...palette.querySelectorAll(".search-results a")];
let searches = 0;
const moveSelection = (step) => {
  const all = results();
  const at = all.findIndex((result) => result.classList.contains("is-selected"));
  all[at]?.classList.remove("is-selected");
  const next = all[(at + step + all.length) % all.length];
  next?.classList.add("is-selected");
  next?.scrollIntoView({ block: "nearest" });
  $("#palette-status", palette).textContent = next ? next.textContent.trim() : _("No results");
};
const runSearch = async () => {
  const number = ++searches;
  const input = $("input", palette);
  const response = await fetch(`${link.href}?q=${encodeURIComponent(input.value)}`, { headers: { "HX-Request": "true" } });
  if (number !== searches || !response.ok) return;
  $(".search-results", palette).innerHTML = await response.text();
  moveSelection(1);
};
const openPalette = () => {
  if (!palette.childElementCount) {
    const form = document.createElement("form");
    form.innerHTML = '<input type="search" autocomplete="off"><kbd>Esc</kbd>';
    form.firstChild.setAttribute("aria-label", _("Name of a screen, key or tenant"));
    form.firstChild.placeholder = _("Search or jump to…");
    const list = document.createElement("div");
    list.className = "search-results";
    const status = document.createElement("p");
    status.id = "palette-status";
    status.className = "visually-hidden";
    status.setAttribute("role", "status");
    palette.append(form, list, status);
    let wait;
    on("input", () => { clearTimeout(wait); wait = setTimeout(runSearch, 120); }, form);
    on("submit", (event) => { event.preventDefault(); $(".search-results a.is-selected", palette)?.click(); }, form);
    on("keydown", (event) => {
      if (event.key === "Escape") { event.preventDefault(); palette.close(); }
      if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); moveSelection(event.key === "ArrowDown" ? 1 : -1); }
    }, form);
  }
  palette.showModal();
  $("input", palette).select();
  runSearch();
};
if (link) on("click", (event) => { event.preventDefault(); openPalette(); }, link);

// Shortcuts: Ctrl K always; `/`, `?` and `g` + letter unless switched off, and not while typing.
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
  } else if (event.key === "?") {
    $("[data-shortcuts]")?.click();
  } else if (event.timeStamp - after < 1500 && /^[a-z]$/.test(event.key)) {
    after = 0;
    $(`[data-letter="${event.key}"]`)?.click();
  } else {
    after = event.key === "g" ? event.timeStamp : 0;
  }
});
