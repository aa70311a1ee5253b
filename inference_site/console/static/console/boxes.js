// Completes the boxes that find a choice by typing (select2): it reports a choice only to jQuery, while
// forms listen to the browser, and it names a box by what is chosen, not by its label. A filter without
// a choice says "all".
addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll(".unfold-filter-autocomplete")) box.dataset.placeholder = "all";
});
addEventListener("load", () => {
  window.django?.jQuery?.(document).on("select2:select select2:clear", ({ target }) => {
    for (const type of ["input", "change"]) target.dispatchEvent(new Event(type, { bubbles: true }));
  });
  setTimeout(() => {
    for (const select of document.querySelectorAll("select.select2-hidden-accessible")) {
      const [label] = select.labels;
      const parts = select.nextElementSibling.querySelectorAll("[role=combobox], [role=textbox], [type=search]");
      for (const part of label ? parts : []) {
        label.id ||= `${select.id}-label`;
        part.setAttribute("aria-labelledby", `${label.id} ${part.getAttribute("aria-labelledby") ?? ""}`.trim());
      }
    }
  });
});
