// The message that is being written, its images, and results of the calls in the last answers.
import { $, complain, made } from "./dom.js";
import { Images, TYPES } from "./images.js";
import { message } from "./talk.js";

const CALL = /^(function|custom_tool)_call$/;

export class Composer {
  #field = $("message");
  #results = $("results");
  // Not in the document: the theme adds a listener of its own to each file field there.
  #files = made("input", "", "", { type: "file", accept: TYPES.join(), multiple: "" });

  constructor(mostImageBytes, changed) {
    this.images = new Images($("images"), mostImageBytes, changed);
    this.#files.addEventListener("change", async () => {
      await this.images.add(this.#files.files);
      this.#files.value = ""; // So that the same file can be chosen again.
    });
    $("add").addEventListener("click", () => this.#files.click());
    this.#field.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    $("compose").addEventListener("dragover", (event) => event.preventDefault());
    $("compose").addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
  }

  #take(event, { files }) {
    if (!files.length) return;
    event.preventDefault();
    if ($("add").hidden) complain("The model takes no images.");
    else this.images.add(files);
  }

  /** Offer images, or not: the models take none. */
  offerImages(isOffered) {
    $("add").hidden = !isOffered;
  }

  /** The parts that are stored while the message is not sent. */
  get draft() {
    return { text: this.#field.value, images: this.images.urls };
  }

  set draft({ text, images }) {
    this.#field.value = text;
    this.images.set(images);
  }

  focus() {
    this.#field.focus();
  }

  /** Return the turn that is being written; the conversation does not have it yet. */
  turn(parent) {
    const { text, images } = this.draft;
    const input = text.trim() || images.length ? [message(text, images)] : [];
    return { parent, input, results: this.#given() };
  }

  #given() {
    const columns = [];
    for (const result of this.#results.querySelectorAll("textarea")) {
      const { column, kind, call } = result.dataset;
      (columns[column] ??= []).push({ type: `${kind}_output`, call_id: call, output: result.value });
    }
    return columns;
  }

  /** Show a field for the result of each call in the answers of the last turn. */
  askForResults(turn) {
    const answers = turn?.answers ?? [];
    this.#results.replaceChildren(...answers.flatMap((answer, column) => {
      const whose = answers.length > 1 ? ` for ${answer.model}` : "";
      return answer.output.filter((item) => CALL.test(item.type)).map((call) => {
        const label = made("label", "", `Result of ${call.name}${whose}`);
        const result = made("textarea", "code", "", { rows: 2 });
        Object.assign(result.dataset, { column, kind: call.type, call: call.call_id });
        label.append(result);
        return label;
      });
    }));
  }
}

export function isEmpty(turn) {
  return !turn.input.length && !turn.results.flat().length;
}
