// One request: sends it, shows the answer as it streams, stops it, and fetches its times and cost.
import { events } from "../responses_api/stream.js";
import { asked, faultOf, headers } from "./dom.js";

const ADDRESS = "/console/playground/responses";
const STORED = "/admin/playground/responses";
const OPEN = ["queued", "in_progress"];
const POLL_MS = 500;
const MOST_POLLS = 240;
const PATIENCE_MS = 60_000;

export class Run {
  #view;
  #answer;
  #begun;
  #connection = new AbortController();
  #isStopped = false;

  /** ``begun`` is called when the response has an id. */
  constructor(answer, begun) {
    this.#answer = answer;
    this.#begun = begun;
  }

  /** Send the request and show its events; fill the answer, also after an error. */
  async send(body, view) {
    this.#view = view;
    const answer = this.#answer;
    try {
      const options = { method: "POST", headers: headers(), body: JSON.stringify(body) };
      const sent = await fetch(ADDRESS, { ...options, signal: this.#connection.signal });
      answer.ignored = sent.headers.get("x-unsupported-params") ?? "";
      if (sent.ok) await this.#follow(sent);
      else answer.error = await faultOf(sent);
      if (!answer.id && !answer.error) answer.error = { message: "The answer was cut off." };
    } catch (fault) {
      if (!this.#isStopped) answer.error = { message: fault.message };
    }
    if (answer.id) await this.#finish();
    else answer.status = this.#isStopped ? "cancelled" : "failed";
  }

  async #follow(sent) {
    const { state } = this.#view;
    for await (const event of events(sent)) {
      // Do not scroll a reader who has scrolled up.
      const isSeen = state.getBoundingClientRect().top < innerHeight;
      if (event.type === "error") {
        const { message, code, param } = event;
        this.#answer.error = { message, code, param };
        continue;
      }
      const response = this.#view.show(event);
      if (response) this.#take(response);
      if (event.type.endsWith(".delta")) state.textContent = `${this.#view.speed().toFixed(1)} tokens/s`;
      if (isSeen) state.scrollIntoView({ block: "nearest" });
    }
  }

  #take(response) {
    const answer = this.#answer;
    const isNew = !answer.id;
    take(answer, response);
    if (!isNew) return;
    this.#begun();
    if (this.#isStopped) this.#askToStop();
  }

  /** Fetch the ended response with its times and its cost. */
  async #finish() {
    try {
      await recover(this.#answer);
    } catch {
      // The output is shown without them; the page fetches them again when it is opened.
    }
    if (!OPEN.includes(this.#answer.status)) return;
    if (!this.#answer.isKept) this.#answer.status = "failed";
    this.#answer.error ??= { message: "The answer was cut off." };
  }

  /** Stop the run. While it has no id, closing the connection cancels it. */
  stop() {
    if (this.#isStopped) return;
    this.#isStopped = true;
    if (this.#answer.id) this.#askToStop();
    else this.#connection.abort();
  }

  async #askToStop() {
    try {
      await asked(`${ADDRESS}/${this.#answer.id}/stop`, { method: "POST", headers: headers() });
    } catch {
      this.#connection.abort();
    }
  }
}

function take(answer, response) {
  answer.id = response.id;
  answer.isKept = response.store !== false;
  answer.status = response.status;
  answer.output = response.output ?? [];
  answer.usage = response.usage ?? null;
  answer.reason = response.incomplete_details?.reason ?? "";
  if (response.error) answer.error = { message: response.error.message, code: response.error.code };
}

/** Fill an answer from the response that the server stores, if it has ended. */
export async function recover(answer) {
  if (!answer.isKept) return;
  for (let poll = 0; poll < MOST_POLLS; poll += 1) {
    const { response, run } = await asked(
      `${STORED}/${encodeURIComponent(answer.id)}`, { signal: AbortSignal.timeout(PATIENCE_MS) },
    );
    if (!OPEN.includes(response.status)) {
      const { error } = answer;
      answer.error = null;
      take(answer, response);
      if (error?.code) answer.error = error; // An error of the server; one without a code is of the connection.
      answer.run = run;
      return;
    }
    await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
  }
}

/** Return whether this page has not seen the end of the answer. */
export function isOpen(answer) {
  return !answer.status || OPEN.includes(answer.status);
}
