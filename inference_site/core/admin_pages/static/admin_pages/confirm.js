// Asks for confirmation before a button with data-confirm submits its form. With data-confirm-from, the
// question is what that address answers now; data-confirm is asked if it does not answer. In the
// question, {chosen} is the number of boxes of the form that are ticked; without any, nothing is asked.
let asking = false;

async function question(button) {
  const { confirm, confirmFrom } = button.dataset;
  try {
    const answer = await fetch(confirmFrom, { signal: AbortSignal.timeout(3000) });
    return answer.ok && !answer.redirected ? await answer.text() : confirm;
  } catch {
    return confirm;
  }
}

async function ask(button) {
  asking = true;
  const { form } = button;
  try {
    if (window.confirm(await question(button))) form.requestSubmit(button);
  } finally {
    asking = false;
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-confirm]");
  if (!button) return;
  if (!button.dataset.confirmFrom) {
    const chosen = [...(button.form?.elements ?? [])].filter((one) => one.checked).length;
    const { confirm } = button.dataset;
    if (!chosen && confirm.includes("{chosen}")) return; // The page says what to do.
    if (!window.confirm(confirm.replace("{chosen}", chosen))) event.preventDefault();
    return;
  }
  event.preventDefault();
  if (!asking) ask(button);
});
