// Shows in each answer what differs from the expected one, or from the first run.
import { differences } from "../admin_pages/differences.js";

const chooser = document.getElementById("differences");

function show() {
  document.querySelectorAll(".bubble-diff").forEach((one) => one.remove());
  const title = chooser.selectedOptions[0].textContent;
  for (const row of document.querySelectorAll("[data-case]")) {
    const texts = [...row.querySelectorAll("[data-answer]")];
    const from = { expected: row.querySelector("[data-expected]"), first: texts[0] }[chooser.value];
    for (const text of texts) {
      const bubble = text.closest(".bubble");
      bubble.hidden = Boolean(from) && from !== text;
      if (!bubble.hidden) continue;
      const run = bubble.querySelector(".bubble-role").textContent.trim();
      bubble.after(differences(from.textContent, text.textContent, `${run}: ${title}`));
    }
  }
}

chooser.addEventListener("change", show);
show(); // It may have been chosen before this script was there.
