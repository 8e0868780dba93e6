// Passkeys: a form with data-passkey asks the browser for one and sends its response.
// data-options has the options; data-options-url is where they come from.
const bytes = (text) => Uint8Array.from(atob(text.replace(/-/g, "+").replace(/_/g, "/")), (c) => c.charCodeAt(0));
const text = (buffer) =>
  btoa(String.fromCharCode(...new Uint8Array(buffer))).replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");

async function optionsOf(form) {
  if (form.dataset.options) return JSON.parse(form.dataset.options).publicKey;
  const response = await fetch(form.dataset.optionsUrl, { headers: { "X-Requested-With": "XMLHttpRequest" } });
  if (!response.ok) throw new Error(response.statusText);
  return (await response.json()).request_options.publicKey;
}

async function ask(form) {
  const options = await optionsOf(form);
  const ids = (list) => (list || []).map((each) => ({ ...each, id: bytes(each.id) }));
  options.challenge = bytes(options.challenge);
  if (form.dataset.passkey === "get") {
    options.allowCredentials = ids(options.allowCredentials);
    return navigator.credentials.get({ publicKey: options });
  }
  options.user.id = bytes(options.user.id);
  options.excludeCredentials = ids(options.excludeCredentials);
  return navigator.credentials.create({ publicKey: options });
}

function sent(credential) {
  const response = { clientDataJSON: text(credential.response.clientDataJSON) };
  for (const name of ["attestationObject", "authenticatorData", "signature", "userHandle"])
    if (credential.response[name]) response[name] = text(credential.response[name]);
  return JSON.stringify({
    id: credential.id,
    rawId: text(credential.rawId),
    type: credential.type,
    response,
    clientExtensionResults: credential.getClientExtensionResults(),
  });
}

for (const form of document.querySelectorAll("form[data-passkey]")) {
  if (!window.PublicKeyCredential) continue;
  form.hidden = false;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    const error = form.querySelector(".field-error");
    button.disabled = true;
    error.hidden = true;
    try {
      form.elements.credential.value = sent(await ask(form));
      form.submit();
    } catch {
      error.hidden = false;
      button.disabled = false;
    }
  });
}
