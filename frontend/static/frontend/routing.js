// Reordering of rules by drag. The order buttons of each rule do the same without a pointer.
"use strict";
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
