// Submits a form with data-apply when one of its fields changes, except fields with data-later.
for (const form of document.querySelectorAll("form[data-apply]")) {
  form.addEventListener("change", (event) => {
    if (!event.target.matches("[data-later]")) form.requestSubmit();
  });
}
