"use strict";
// Dialogs and the drawer. A closed one returns the focus to the element that opened it, else to the row that took its
// place, else to the page's content, also on the page that its form led to. The same happens in a panel that refreshes.
// console.js loads it when it is used.
const CONTROLS = "a[href], button:enabled, summary, input:enabled:not([type=hidden]), select:enabled, textarea:enabled";
const openers = new WeakMap(); // elements that opened a dialog, with their places
const urlOf = (element) => element.getAttribute("hx-get") || element.getAttribute("href");
const placeOf = (element) => {
  const row = element.closest("tr, li");
  const part = element.parentElement?.closest("[id]");
  return {
    url: urlOf(element),
    part: part?.id,
    index: part ? [...part.querySelectorAll(CONTROLS)].indexOf(element) : -1,
    row: part && row ? row.localName : "",
    number: part && row ? [...part.querySelectorAll(row.localName)].indexOf(row) : 0,
  };
};
const usable = (element) => {
  if (!element?.isConnected || element === document.body) return;
  if (element.checkVisibility()) return element;
  const summary = element.closest("details:not([open])")?.querySelector("summary");
  return summary?.checkVisibility() ? summary : undefined;
};
const findPlace = ({ url, part, index, row, number }) => {
  const within = document.getElementById(part) || $("main");
  const opens = (element) => urlOf(element) === url && usable(element);
  const links = url ? [...within.querySelectorAll(CONTROLS), ...$("main").querySelectorAll(CONTROLS)] : [];
  const rows = row ? within.querySelectorAll(row) : [];
  const next = rows[Math.min(number, rows.length - 1)]?.querySelectorAll(CONTROLS) || [];
  const same = url ? undefined : within.querySelectorAll(CONTROLS)[index];
  return usable(links.find(opens)) || usable(same) || [...next].find(usable) || $("main");
};
const focusPlace = (place) => {
  const at = findPlace(place);
  at.focus({ preventScroll: at.localName === "main" });
};
const openDialog = (dialog, element) => {
  addToUrl(dialog, element);
  if (dialog.open) return ($("[aria-invalid=true]", dialog) || $("[type=submit]", dialog))?.focus();
  // Of a form, the opener is its button. The palette's actions are requests of the page, which had the focus elsewhere.
  const active = document.activeElement;
  const opener = active.matches(CONTROLS) || !element.closest("main, header") ? active : element;
  openers.set(dialog, { opener, place: placeOf(opener) });
  dialog.showModal();
  $("form :is(input, select, textarea):enabled:not([type=hidden])", dialog)?.focus();
  const title = $("h1", dialog);
  if (title) dialog.setAttribute("aria-label", title.textContent);
};

// They close by Esc, a click outside, or [data-close].
on("click", (event) => {
  const dialog = event.target.closest("dialog");
  if (!dialog) return;
  const link = event.target.closest("a[href]:not([hx-get], [target], [data-close], [data-dialog])");
  if (link) keepPlace(dialog);
  if (event.target !== dialog && !event.target.closest("[data-close]")) return;
  event.preventDefault();
  dialog.close();
});
document.addEventListener("close", ({ target: dialog }) => {
  if (dialog.id === "dialog" || dialog.id === "drawer") dialog.replaceChildren();
  if (dialog.id === "drawer") removeFromUrl();
  const { opener, place } = openers.get(dialog) || {};
  openers.delete(dialog);
  if (document.activeElement !== document.body) return;
  const at = usable(opener);
  at ? at.focus() : focusPlace(place || {});
}, true);

// The page that a dialog leads to gets the focus at the same place.
const keepPlace = (dialog) => {
  const found = openers.get($("#drawer")) || openers.get(dialog);
  if (found) sessionStorage.place = JSON.stringify(found.place);
};
on("htmx:beforeOnLoad", ({ detail: { elt, xhr } }) => {
  const dialog = elt.closest("dialog");
  if (dialog && xhr.getResponseHeader("HX-Redirect")) keepPlace(dialog);
});
if (sessionStorage.place) {
  const place = JSON.parse(sessionStorage.place);
  delete sessionStorage.place;
  if (document.activeElement === document.body) focusPlace(place);
}

// The request in the drawer is part of the URL: a shared link opens it, and the browser's back button closes it.
const shownRequest = () => ($("#playground-data") ? null : new URLSearchParams(location.search).get("request"));
const urlWith = (id) => {
  const url = new URL(location);
  if (id) url.searchParams.set("request", id);
  else url.searchParams.delete("request");
  return url;
};
const addToUrl = (dialog, element) => {
  const id = /^\/t\/[^/]+\/requests\/([\w-]+)$/.exec(urlOf(element) || "")?.[1];
  if (dialog.id !== "drawer" || !id || id === shownRequest()) return;
  if (dialog.open) history.replaceState(history.state, "", urlWith(id));
  else history.pushState({ isDrawer: true }, "", urlWith(id));
};
const removeFromUrl = () => {
  if (!shownRequest()) return;
  if (history.state?.isDrawer) history.back();
  else history.replaceState(null, "", urlWith(""));
};
const openRequest = () => {
  const [tenant] = /^\/t\/[^/]+/.exec(location.pathname) || [];
  const url = `${tenant}/requests/${encodeURIComponent(shownRequest())}`;
  if (tenant && shownRequest()) htmx.ajax("GET", url, { target: "#drawer", swap: "innerHTML" });
};
on("popstate", () => (shownRequest() ? openRequest() : $("#drawer").open && $("#drawer").close()), window);
openRequest();

// A panel that refreshes keeps the focus.
function keepFocus(panel) {
  const place = placeOf(document.activeElement);
  const restore = ({ target }) => target === panel && document.activeElement === document.body && focusPlace(place);
  panel.addEventListener("htmx:afterSwap", restore, { once: true });
}
