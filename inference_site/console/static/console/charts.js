// Shows the values of the chart's table for the bucket under the pointer.
const LEFT = 84;
const WIDTH = 720;

const tip = document.createElement("div");
tip.className = "chart-tip";
tip.setAttribute("aria-hidden", "true"); // A screen reader has the table.
tip.hidden = true;
document.body.append(tip);

function rowAt(chart, x) {
  const box = chart.getBoundingClientRect();
  const place = ((x - box.left) / box.width) * WIDTH - LEFT;
  const rows = chart.closest("figure").querySelectorAll("tbody tr");
  return rows[Math.floor((place / (WIDTH - LEFT)) * rows.length)];
}

function line(text, swatch) {
  const shown = document.createElement("div");
  if (swatch) shown.append(swatch.cloneNode());
  shown.append(text);
  return shown;
}

function show(chart, event) {
  const row = rowAt(chart, event.clientX);
  tip.hidden = !row;
  if (!row) return;
  const names = chart.closest("figure").querySelectorAll(".legend li");
  const [time, ...values] = row.cells;
  const lines = values.map((value, index) =>
    line(`${names[index].textContent}: ${value.textContent}`, names[index].querySelector(".swatch")));
  tip.replaceChildren(line(`${time.textContent} UTC`), ...lines);
  const width = tip.offsetWidth;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

for (const name of ["pointermove", "pointerdown"]) {
  document.addEventListener(name, (event) => {
    const chart = event.target.closest?.(".usage-chart svg");
    if (chart) show(chart, event);
    else tip.hidden = true;
  });
}
addEventListener("scroll", () => (tip.hidden = true), true);
