"use strict";
// The dialog that asks to sign in or to confirm it's you over the page, and then sends the refused requests again.
// console.js loads it when the server asks for it.
const asking = document.createElement("dialog");
asking.className = "dialog";
document.body.append(asking);
let refused = []; // functions that send a request again
let address; // of the current step
const askAgain = async (url, again) => {
  refused.push(again);
  if (asking.open) return;
  const [step] = await Promise.all([fetch(url), load(dialogs)]);
  await showStep(step);
  if (!asking.childElementCount) return;
  asking.showModal();
  $("input:not([type=hidden])", asking)?.focus();
};
const repeat = (element, event) => {
  if (event?.type === "submit") element.requestSubmit(event.submitter);
  else if (event?.type === "click") element.click();
  else if (event) htmx.trigger(element, event.type);
};
const showStep = async (response) => {
  if (response.headers.get("X-Signed-In")) return sendAgain(await response.json());
  address = response.url;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const card = $("main .card", page);
  const [form, ...others] = card.querySelectorAll("form:not([data-passkey])");
  const usable = form?.getAttribute("action") ? undefined : form;
  const content = document.createElement("div");
  content.className = "dialog-content";
  content.append($("h1", card), ...card.querySelectorAll(":scope > .alert, :scope > p:not(:has(a))"));
  if (usable) content.append(usable);
  const buttons = document.createElement("div");
  buttons.className = "buttons";
  buttons.innerHTML = '<a class="button" target="_blank"></a><button class="button" type="button" data-signed-in></button><button class="button" type="button" data-close></button>';
  const [other, done, cancel] = buttons.children;
  other.textContent = _("Other ways to sign in");
  other.href = address;
  done.textContent = _("Continue");
  cancel.textContent = _("Cancel");
  if (usable && !others.length && !$("[data-passkey]", card)) { other.remove(); done.remove(); }
  content.append(buttons);
  asking.setAttribute("aria-label", $("h1", content).textContent);
  asking.replaceChildren(content);
  if (asking.open) $("[aria-invalid=true], input:not([type=hidden])", asking)?.focus();
};
const sendAgain = ({ user, token }) => {
  if (user !== $("#toasts").dataset.user) return location.reload();
  for (const field of document.querySelectorAll("[name=csrfmiddlewaretoken]")) field.value = token;
  const all = refused;
  refused = [];
  asking.close();
  for (const again of all) again();
};
on("submit", async (event) => {
  event.preventDefault();
  showStep(await fetch(address, { method: "POST", body: new FormData(event.target) }));
}, asking);
on("click", async ({ target }) => {
  if (target.closest("[data-signed-in]")) showStep(await fetch($("#toasts").dataset.signedIn));
}, asking);
on("close", () => { refused = []; asking.replaceChildren(); }, asking);

// A form that leaves its page is sent only if the sign-in has not expired while the page was open.
const checked = new WeakSet();
on("submit", async (event) => {
  const form = event.target;
  if (event.defaultPrevented || form.method !== "post" || form.matches("[hx-post]") || checked.has(form)) return;
  event.preventDefault();
  const again = () => { checked.add(form); form.requestSubmit(event.submitter); };
  const response = await fetch($("#toasts").dataset.signedIn);
  if (response.headers.get("X-Signed-In")) again();
  else askAgain(response.url, again);
});
