// A form with data-apply is sent as soon as one of its fields changes, but for those with data-later.
for (const form of document.querySelectorAll("form[data-apply]")) {
  form.addEventListener("change", (event) => {
    if (!event.target.matches("[data-later]")) form.requestSubmit();
  });
}
