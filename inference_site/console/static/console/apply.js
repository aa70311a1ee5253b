// A form with data-apply is sent as soon as one of its fields changes.
for (const form of document.querySelectorAll("form[data-apply]")) {
  form.addEventListener("change", () => form.requestSubmit());
}
