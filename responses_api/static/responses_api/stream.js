// Server-sent events over fetch, and a response's events as bubbles.

/** Yield the JSON of each event of an SSE answer, until it ends. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const line = frame.split("\n").find((one) => one.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function element(name, classes, text = "") {
  const made = document.createElement(name);
  made.className = classes;
  made.textContent = text;
  return made;
}

function laidOut(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Shows the output of one response while it comes. */
export class AnswerView {
  #container;
  #texts = new Map();
  #startedAt = null;
  #deltas = 0;

  constructor(container) {
    this.#container = container;
    this.state = element("p", "answer-state", "Waiting …");
    container.append(this.state);
  }

  /** Take one event; return the response's object with those that have it. */
  show(event) {
    const short = event.type.replace("response.", "");
    if (short === "output_item.added") this.#begin(event.output_index, event.item);
    else if (short.endsWith(".delta")) this.#grow(event);
    else if (short === "output_item.done") this.#end(event.output_index, event.item);
    else if (short === "in_progress") this.#start();
    else if (short === "queued") this.state.textContent = "Waiting in the queue …";
    else if (event.type === "error") this.fail(event.message);
    return event.response;
  }

  fail(message) {
    const bubble = element("div", "bubble bubble-error");
    bubble.setAttribute("role", "alert");
    bubble.append(element("p", "bubble-role", "Error"), element("div", "bubble-text", message));
    this.#container.insertBefore(bubble, this.state.isConnected ? this.state : null);
  }

  /** Output tokens a second by what has come, or by what the response says that it used. */
  speed(tokens = this.#deltas) {
    const seconds = (performance.now() - this.#startedAt) / 1000;
    return this.#startedAt === null || seconds <= 0 ? 0 : tokens / seconds;
  }

  /** What came before is of an attempt that another worker began anew. */
  #start() {
    this.#container.replaceChildren(this.state);
    this.#texts.clear();
    this.#startedAt = null;
    this.#deltas = 0;
    this.state.textContent = "Running …";
  }

  #begin(index, item) {
    this.#texts.set(index, this.#bubble(item));
  }

  #bubble(item) {
    if (item.type === "reasoning") {
      const folded = element("details", "bubble bubble-reasoning");
      const text = element("div", "bubble-text");
      folded.append(element("summary", "", "Reasoning"), text);
      this.#container.insertBefore(folded, this.state);
      return text;
    }
    const isCall = item.type.endsWith("_call");
    const bubble = element("div", isCall ? "bubble bubble-call" : "bubble bubble-assistant");
    const text = element(isCall ? "pre" : "div", isCall ? "bubble-json" : "bubble-text");
    if (isCall) text.tabIndex = 0;
    bubble.append(element("p", "bubble-role", isCall ? `Call of ${item.name}` : "assistant"), text);
    this.#container.insertBefore(bubble, this.state);
    return text;
  }

  #grow(event) {
    this.#startedAt ??= performance.now();
    this.#deltas += 1;
    this.#texts.get(event.output_index)?.append(event.delta);
  }

  #end(index, item) {
    const text = this.#texts.get(index);
    if (text && item.type.endsWith("_call")) text.textContent = laidOut(text.textContent);
  }
}
