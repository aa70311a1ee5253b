// The columns of answers: each has a model and settings of its own, and one of them is in the form.
import { button } from "./dom.js";
import { fill, valuesOf } from "./form.js";
import { newId } from "./talk.js";

const MOST = 4;

/** Return the columns of a conversation that was kept before a column had settings of its own. */
function olderValues({ other, ...values }) {
  return other ? [values, { ...values, model: other }] : [values];
}

export class Columns {
  #form;
  #bar;
  #changed;
  #all;
  #chosen = 0;

  constructor(form, bar, changed) {
    this.#form = form;
    this.#bar = bar;
    this.#changed = changed;
    this.#all = [{ ...valuesOf(form), column: 0 }];
    form.elements.model.addEventListener("change", () => this.#draw());
    this.#draw();
  }

  /** The values of the form for each column; ``column`` tells columns with the same values apart. */
  get values() {
    const { column } = this.#all[this.#chosen];
    this.#all[this.#chosen] = { ...valuesOf(this.#form), column };
    return [...this.#all];
  }

  /** The place of the column that is in the form. */
  get chosen() {
    return this.#chosen;
  }

  /** Take the columns of a conversation, and show the first. */
  set values(values) {
    const all = Array.isArray(values) ? values : olderValues(values);
    this.#all = all.map((one, place) => ({ column: place, ...one }));
    this.#chosen = 0;
    fill(this.#form, this.#all[0]);
    this.#draw();
  }

  #show(place, all = this.values) {
    this.#all = all;
    this.#chosen = place;
    fill(this.#form, all[place]);
    this.#draw();
    this.#changed();
  }

  #draw() {
    const all = this.values;
    const name = ({ model }) => model || "no model";
    const tabs = all.map((values, place) => {
      const label = all.length > 1 ? `${place + 1}: ${name(values)}` : name(values);
      const isChosen = String(place === this.#chosen);
      return button(label, () => this.#show(place), { "aria-pressed": isChosen });
    });
    if (all.length < MOST) {
      const copied = { ...all[this.#chosen], column: newId() };
      tabs.push(button("Add column", () => this.#show(all.length, [...this.values, copied])));
    }
    if (all.length > 1) {
      const others = () => this.values.filter((_, place) => place !== this.#chosen);
      tabs.push(button("Remove column", () => this.#show(0, others())));
    }
    this.#bar.replaceChildren(...tabs);
  }
}
