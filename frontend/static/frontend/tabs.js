"use strict";
// Tabs of examples, which console.js loads if the page has some.
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
