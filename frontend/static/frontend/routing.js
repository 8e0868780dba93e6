"use strict";
// The result of a check replaces the rules and the JSON, unless they were changed since, or it is not of the newest
// check. While the button of a rule is in effect, nothing else can be changed or submitted.
let edits = 0;
let newest = null; // the request of the newest check
let editsBefore = 0; // this check
on("input", ({ target }) => { if (target.closest("#rule-rows, #policy-json")) edits += 1; });
on("htmx:beforeRequest", ({ detail: { elt, xhr } }) => {
  const form = elt.closest("[data-routing]");
  if (!form) return;
  newest = xhr;
  editsBefore = edits;
  if (elt.localName !== "button") return;
  form.inert = true;
  on("loadend", () => { form.inert = false; }, xhr);
});
on("htmx:beforeSwap", (event) => {
  const { target, xhr } = event.detail;
  if (target.id === "checked" && (xhr !== newest || edits !== editsBefore)) event.detail.shouldSwap = false;
});
on("htmx:oobBeforeSwap", ({ detail: { target, fragment } }) => {
  if (target.id !== "rule-rows") return;
  const before = [...target.querySelectorAll(".rule-edit")];
  const after = [...fragment.querySelectorAll(".rule-edit")];
  if (before.length === after.length) after.forEach((details, index) => { details.open ||= before[index].open; });
});

// Reordering of rules by drag. The order buttons of each rule do the same without a pointer.
let dragged = null;
const rowOf = (target) => target.closest?.("[data-routing] .rule-row");
on("dragstart", (event) => {
  if (!event.target.closest?.(".rule-grip")) return;
  dragged = rowOf(event.target);
  event.dataTransfer.effectAllowed = "move";
  event.dataTransfer.setData("text/plain", dragged.dataset.rule);
  event.dataTransfer.setDragImage(dragged, 12, 12);
});
on("dragover", (event) => {
  const row = dragged && rowOf(event.target);
  if (!row) return;
  event.preventDefault();
  for (const other of document.querySelectorAll(".rule-row")) other.classList.toggle("is-drop-target", other === row && row !== dragged);
});
on("dragend", () => {
  dragged = null;
  for (const row of document.querySelectorAll(".rule-row")) row.classList.remove("is-drop-target");
});
on("drop", (event) => {
  const row = dragged && rowOf(event.target);
  if (!row) return;
  event.preventDefault();
  if (row === dragged) return;
  const button = $("button[name=op]", dragged);
  button.disabled = false;
  button.value = `move:${dragged.dataset.rule}:${row.dataset.rule}`;
  button.click();
});
