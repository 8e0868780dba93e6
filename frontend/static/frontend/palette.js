"use strict";
// The command palette, which console.js loads when it is opened first.
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
const showPalette = () => {
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
    on("click", (event) => {
      const action = event.target.closest("[data-dialog]");
      if (!action) return;
      event.preventDefault();
      palette.close();
      htmx.ajax("GET", action.href, { target: "#dialog", swap: "innerHTML" });
    }, list);
    let wait;
    on("input", () => { clearTimeout(wait); wait = setTimeout(runSearch, 120); }, form);
    on("submit", (event) => { event.preventDefault(); $(".search-results a.is-selected", palette)?.click(); }, form);
    on("keydown", (event) => {
      if (event.key === "Escape") { event.preventDefault(); palette.close(); }
      if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); moveSelection(event.key === "ArrowDown" ? 1 : -1); }
    }, form);
  }
  load(dialogs);
  palette.showModal();
  $("input", palette).select();
  runSearch();
};
