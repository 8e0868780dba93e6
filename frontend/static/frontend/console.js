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

// Menus close when another element is used, and by Escape.
const closeMenus = (target) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(target)) menu.open = false;
};
on("click", (event) => closeMenus(event.target));
on("focusin", (event) => closeMenus(event.target));
on("keydown", (event) => {
  const menu = event.key === "Escape" && $("details.menu[open]");
  if (!menu) return;
  event.preventDefault();
  menu.open = false;
  $("summary", menu).focus();
});

// Panels do not refresh while the page is hidden, a field or chart has focus, or rows are selected. A link keeps the focus.
const last = new WeakMap();
on("htmx:beforeRequest", (event) => {
  const { elt, requestConfig } = event.detail;
  if (!elt.matches(".panel") || requestConfig.triggeringEvent?.type === "load") return;
  if (document.hidden || $("details[open], :focus:is(input, select, textarea, [role=slider]), input:checked", elt)) event.preventDefault();
  else if ($(":focus", elt)) load(dialogs);
});
on("htmx:beforeSwap", (event) => {
  const { target, xhr, requestConfig } = event.detail;
  if (xhr.status >= 500 && !xhr.getResponseHeader("X-Panel")) event.detail.shouldSwap = false;
  if (!target.matches(".panel")) return;
  if (last.get(target) === xhr.responseText) event.detail.shouldSwap = false;
  else if (requestConfig.elt === target && $(":focus", target)) {
    if (!window.keepFocus) return (event.detail.shouldSwap = false);
    keepFocus(target);
  }
  last.set(target, xhr.responseText);
});
const showError = (text) => {
  const toast = document.createElement("p");
  toast.className = "toast error";
  toast.textContent = text;
  $("#toasts").append(toast);
};
on("htmx:responseError", ({ detail: { elt, xhr, requestConfig } }) => {
  const url = xhr.getResponseHeader("X-Sign-In");
  if (url) return load(signIn).then(() => askAgain(url, () => repeat(elt, requestConfig.triggeringEvent)));
  const reason = xhr.getResponseHeader("X-Reason");
  if (reason) showError(decodeURIComponent(reason));
  else if (!xhr.getResponseHeader("X-Panel")) showError(_("The request failed (%(status)s). Try again. Request ID: %(id)s.", { status: xhr.status, id: xhr.getResponseHeader("X-Request-Id") || "–" }));
});
on("htmx:sendError", ({ detail: { elt } }) => elt.matches(".panel") || showError(_("Cannot reach the server. Nothing was changed. Try again.")));
on("click", (event) => event.target.closest(".toast")?.remove());
setTimeout(() => document.querySelectorAll(".toast.success").forEach((toast) => toast.remove()), 5000);

// Scripts and styles that few pages need are loaded when they are used.
const loaded = {};
const load = (url) => (loaded[url] ||= new Promise((resolve) => {
  const isStyle = /\.css$/.test(url);
  const part = document.createElement(isStyle ? "link" : "script");
  Object.assign(part, isStyle ? { rel: "stylesheet", href: url } : { src: url });
  on("load", resolve, part);
  document.head.append(part);
}));
const { signIn, copyScript, dialogs } = $("#toasts").dataset;
on("htmx:beforeRequest", ({ detail: { target } }) => target.localName === "dialog" && load(dialogs));
on("htmx:afterSwap", ({ detail: { target, requestConfig } }) => target.localName === "dialog" && load(dialogs).then(() => openDialog(target, requestConfig.elt)));
if (sessionStorage.place || /[?&]request=/.test(location.search)) load(dialogs);
setTimeout(() => load(signIn), 240000);
on("click", ({ target }) => target.closest("[data-copy]") && load(copyScript).then(() => copyText(target.closest("[data-copy]"))));

const tabs = $("[data-tabs]");
if (tabs) load(tabs.dataset.tabs);

// Filter forms apply when a choice changes.
on("change", ({ target }) => target.closest("form[data-auto]")?.requestSubmit());

const palette = $("#palette");
const link = $("[data-palette]");
const openPalette = async () => {
  await Promise.all(link.dataset.palette.split(" ").map(load));
  showPalette();
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
