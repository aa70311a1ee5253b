// "?" shows the list of shortcuts, except while the user types.
addEventListener("DOMContentLoaded", () => {
  const list = document.getElementById("shortcuts");
  if (!list) return;
  addEventListener("keydown", (event) => {
    if (event.key !== "?" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, [contenteditable]")) return;
    if (document.querySelector("dialog[open]")) return;
    event.preventDefault();
    list.showModal();
  });
  list.addEventListener("mousedown", (event) => {
    if (event.target === list) list.close(); // Beside the content.
  });
});
