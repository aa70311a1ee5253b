// The elements of turns: the message that was sent, and the answers side by side.
import { MarkdownText, showJson } from "../admin_pages/markdown.js";
import { AnswerView } from "../responses_api/stream.js";
import { differences } from "../admin_pages/differences.js";
import { asked, button, complain, copyFrom, headers, made } from "./dom.js";
import { isOpen } from "./run.js";
import { branches, textOf } from "./talk.js";

/** Return the element of a turn. ``act`` has the functions of its buttons: edit, again and show. */
export function drawTurn(talk, turn, act) {
  const element = made("article", "turn");
  const sent = made("div", "sent");
  sent.append(...[...turn.results.flat(), ...turn.input].map(bubbleOf));
  const answers = made("div", "answers");
  const bar = barOf(talk, turn, sent, act);
  element.append(sent, bar, answers);
  element.answers = turn.answers.map((answer) => drawAnswer(answers, answer));
  if (turn.answers.length > 1) bar.prepend(comparison(turn, element.answers));
  return element;
}

function bubbleOf(item) {
  const content = item.content ?? item.output ?? "";
  const bubble = made("div", `bubble bubble-${item.role ?? "user"} bubble-sent`);
  bubble.append(made("p", "bubble-role", item.role ?? "result of a call"));
  const text = textOf(content);
  if (text) bubble.append(made("div", "bubble-text", text));
  for (const part of Array.isArray(content) ? content : []) {
    const url = part.image_url ?? "";
    if (url.startsWith("data:image/")) bubble.append(made("img", "bubble-image", "", { src: url, alt: "Image in the request" }));
    else if (!("text" in part) && !("refusal" in part)) bubble.append(made("p", "bubble-note", url || part.type));
  }
  return bubble;
}

function barOf(talk, turn, sent, act) {
  const bar = made("div", "turn-bar");
  const said = turn.input.findLast((item) => item.role === "user");
  if (said) bar.append(button("Edit", () => edit(turn, said, sent, bar, act)));
  bar.append(button(turn.answers.length ? "Regenerate" : "Run", () => act.again(turn)));
  const all = branches(talk, turn);
  if (all.length === 1) return bar;
  const place = all.indexOf(turn);
  const to = (label, other) => {
    const control = button(label === "Previous branch" ? "‹" : "›", () => act.show(other), { "aria-label": label });
    control.disabled = !other;
    return control;
  };
  bar.append(
    to("Previous branch", all[place - 1]),
    made("span", "bubble-note", `${place + 1} of ${all.length}`),
    to("Next branch", all[place + 1]),
  );
  return bar;
}

/** The button that shows each answer as its differences from the first one, and back. */
function comparison(turn, views) {
  return button("Show differences", (control) => {
    const isShown = control.getAttribute("aria-pressed") !== "true";
    control.setAttribute("aria-pressed", isShown);
    const [first, ...others] = views;
    for (const view of others) {
      view.element.querySelector(".bubble-diff")?.remove();
      const bubbles = view.element.querySelectorAll(".bubble-assistant");
      for (const bubble of bubbles) bubble.hidden = isShown;
      if (isShown) {
        bubbles[0]?.before(differences(allText(first), allText(view)));
      }
    }
  }, { "aria-pressed": "false" });
}

function allText(view) {
  return view.messages.map((message) => message.text).join("\n\n");
}

/** Replace the message by a field; a message sent from it starts a branch. */
function edit(turn, said, sent, bar, act) {
  const form = made("form", "edit");
  const field = made("textarea", "", "", { "aria-label": "Edited message", rows: 4 });
  field.value = textOf(said.content);
  const cancel = button("Cancel", () => {
    form.remove();
    sent.hidden = bar.hidden = false;
  });
  form.append(field, made("p", "compose-buttons"));
  form.lastChild.append(cancel, made("button", "button-main", "Send as a branch"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) act.edit(turn, said, field.value);
  });
  sent.before(form);
  sent.hidden = bar.hidden = true;
  field.focus();
}

/** Show one answer; return the view that shows its events. */
function drawAnswer(answers, answer) {
  const element = made("div", "answer", "", { role: "group", "aria-label": `Answer of ${answer.model}` });
  if (answer.model) element.append(made("h2", "answer-model", answer.model));
  const output = made("div", "answer-output");
  element.append(output);
  answers.append(element);
  const view = new AnswerView(output, { Text: MarkdownText, showJson });
  view.element = element;
  if (!isOpen(answer)) showEnd(view, answer);
  return view;
}

/** Show an ended answer: its output, unless its events were shown, and its times and cost. */
export function showEnd(view, answer, isLive = false) {
  if (isLive) for (const message of view.messages) message.end(); // A stop leaves it open.
  else showOutput(view, answer);
  if (answer.error) view.fail(told(answer.error));
  view.element.querySelector(".answer-foot")?.remove();
  const foot = made("div", "answer-foot");
  const facts = made("p", "usage");
  facts.append(...factsOf(answer).map((fact) => made("span", "", fact)));
  foot.append(facts);
  const said = answer.output.filter((item) => item.type === "message");
  const text = said.map((item) => textOf(item.content)).join("\n\n");
  if (text) {
    foot.append(
      button("Copy", (element) => copyFrom(element, text)),
      button("Plain text", (control) => showPlain(view, control), { "aria-pressed": "false" }),
    );
  }
  if (text && answer.id && answer.isKept) foot.append(ratings(answer));
  view.state.remove();
  view.element.append(foot);
}

/** The buttons that rate an answer which the server stores. */
function ratings(answer) {
  const row = made("span", "ratings", "", { role: "group", "aria-label": "Feedback" });
  const note = made("input", "", "", { placeholder: "Why?", "aria-label": "Note", maxlength: 4000 });
  const rate = async (rating) => {
    const body = JSON.stringify({ rating, note: note.value });
    const address = `/admin/playground/responses/${encodeURIComponent(answer.id)}/feedback`;
    try {
      await asked(address, { method: "POST", headers: headers(), body });
      answer.rating = rating;
      note.hidden = false;
      for (const one of controls) one.setAttribute("aria-pressed", one.value === rating);
    } catch (fault) {
      complain(fault.message);
    }
  };
  const controls = [["up", "Good"], ["down", "Bad"]].map(([value, label]) => button(
    label, () => rate(value), { value, "aria-pressed": String(answer.rating === value) },
  ));
  note.hidden = true;
  note.addEventListener("change", () => rate(answer.rating));
  row.append(...controls, note);
  return row;
}

function showPlain(view, control) {
  const isPlain = control.getAttribute("aria-pressed") !== "true";
  control.setAttribute("aria-pressed", isPlain);
  for (const message of view.messages) message.isPlain = isPlain;
}

function showOutput(view, answer) {
  view.show({ type: "response.in_progress" });
  answer.output.forEach((item, index) => {
    const text = item.arguments ?? item.input ?? textOf(item.content?.length ? item.content : item.summary);
    view.show({ type: "response.output_item.added", output_index: index, item });
    if (text) view.show({ type: "response.output_text.delta", output_index: index, delta: text });
    view.show({ type: "response.output_item.done", output_index: index, item });
  });
}

function told({ message, code, param, requestId }) {
  const where = [code, param, requestId].filter(Boolean).join(" · ");
  return where ? `${message}\n${where}` : message;
}

function factsOf({ status, reason, usage, run, ignored }) {
  const facts = [status.replace("_", " ")];
  if (reason) facts.push(reason);
  if (usage) {
    const thought = usage.output_tokens_details.reasoning_tokens;
    facts.push(`${usage.input_tokens} in (${usage.input_tokens_details.cached_tokens} cached)`);
    facts.push(`${usage.output_tokens} out${thought ? ` (${thought} reasoning)` : ""}`);
  }
  if (run?.ttft_ms != null) facts.push(`first token ${Math.round(run.ttft_ms)} ms`);
  if (run?.tokens_per_s != null) facts.push(`${run.tokens_per_s.toFixed(1)} tokens/s`);
  if (run) facts.push(run.cost);
  if (ignored) facts.push(`ignored: ${ignored}`);
  return facts;
}
