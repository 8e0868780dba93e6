"use strict";
// The copy button of a text, which console.js loads when one is used.
const copyText = async (button) => {
  await navigator.clipboard.writeText(button.dataset.copy || $("code", button.parentElement).textContent);
  const [label, title] = [button.getAttribute("aria-label"), button.title];
  if (title === _("Copied")) return;
  button.setAttribute("aria-label", _("Copied"));
  button.title = _("Copied");
  setTimeout(() => { button.setAttribute("aria-label", label); button.title = title; }, 2000);
};
