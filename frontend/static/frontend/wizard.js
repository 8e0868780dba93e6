"use strict";
// The forms of the wizard. The server does not send secrets back, so they are kept here when a form is refused.
let secrets = [];
on("htmx:beforeSwap", ({ detail: { target } }) => {
  if (!target.matches("form[data-wizard]")) return;
  secrets = [...target.querySelectorAll("[type=password]")].map(({ name, value }) => [name, value]);
});
on("htmx:afterSwap", ({ target }) => {
  if (!target.matches("form[data-wizard]")) return;
  for (const [name, value] of secrets) if (target.elements[name]) target.elements[name].value = value;
  secrets = [];
  ($("[aria-invalid=true]", target) || ($(".alert", target) && $("[type=submit]", target)))?.focus();
});
// The picker of the listed models fills the field of the model's name.
on("change", ({ target }) => {
  if (target.dataset.fills && target.value) document.getElementById(target.dataset.fills).value = target.value;
});
