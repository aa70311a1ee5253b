// The playground: sends the form as a request, shows the answer as it streams, and stops it.
import { AnswerView, copy, events } from "../responses_api/stream.js";
import { asCurl, asPython, settingsOf } from "./requests.js";

const ADDRESS = "/console/playground/responses";
const $ = (id) => document.getElementById(id);
const settings = $("settings");
const message = $("message");
const origin = settings.dataset.origin;
let talk = newTalk();

/** A conversation. An answer that ends after its conversation was replaced changes nothing. */
function newTalk() {
  return { previous: null, running: null, calls: [], last: null };
}

function made(name, classes, text = "") {
  const element = document.createElement(name);
  element.className = classes;
  element.textContent = text;
  return element;
}

function headers() {
  const token = settings.querySelector("[name=csrfmiddlewaretoken]").value;
  return { "content-type": "application/json", "x-csrftoken": token };
}

/** Return the input of the request: results of the last answer's calls, then the message. */
function input() {
  const results = talk.calls.map((call) => ({
    type: call.type === "function_call" ? "function_call_output" : "custom_tool_call_output",
    call_id: call.call_id,
    output: $(`result-${call.call_id}`).value,
  }));
  const text = message.value;
  if (!results.length) return text;
  return text.trim() ? [...results, { role: "user", content: text }] : results;
}

function body() {
  const asked = { ...settingsOf(settings), input: input(), stream: true };
  if (talk.previous) asked.previous_response_id = talk.previous;
  return asked;
}

function complain(text) {
  $("complaint").textContent = text;
}

function isEmpty(asked) {
  return typeof asked.input === "string" && !asked.input.trim();
}

/** Show the request as code: the one in the form, or the last one sent if the form is empty. */
function showCode() {
  try {
    const now = body();
    const asked = isEmpty(now) && talk.last ? talk.last : now;
    $("as-curl").textContent = asCurl(origin, asked);
    $("as-python").textContent = asPython(origin, asked);
    complain("");
  } catch (error) {
    complain(error.message);
  }
}

function setRunning(running) {
  talk.running = running;
  $("stop").hidden = !running;
  $("send").disabled = Boolean(running);
  if (running) $("stop").disabled = false;
}

function showSent(asked) {
  $("hint")?.remove();
  const sent = Array.isArray(asked.input) ? asked.input : [{ role: "user", content: asked.input }];
  for (const item of sent) {
    const bubble = made("div", "bubble bubble-user");
    bubble.append(
      made("p", "bubble-role", item.role ?? "result of a call"),
      made("div", "bubble-text", item.content ?? item.output),
    );
    $("turns").append(bubble);
  }
}

/** Show a field for the result of each call in the answer. */
function askForResults(output) {
  talk.calls = output.filter((item) => item.type.endsWith("_call"));
  $("results").replaceChildren(
    ...talk.calls.map((call) => {
      const label = made("label", "", `Result of ${call.name}`);
      const field = made("textarea", "code");
      field.id = `result-${call.call_id}`;
      field.rows = 2;
      label.append(field);
      return label;
    }),
  );
}

function showUsage(view, response, ignored) {
  const usage = made("p", "usage");
  const facts = [response.status];
  if (response.incomplete_details) facts.push(response.incomplete_details.reason);
  if (response.usage) {
    const { input_tokens: given, output_tokens: made_, input_tokens_details: d } = response.usage;
    const thought = response.usage.output_tokens_details.reasoning_tokens;
    facts.push(`${given} in (${d.cached_tokens} cached)`);
    facts.push(`${made_} out${thought ? ` (${thought} reasoning)` : ""}`);
    const speed = view.speed(made_);
    if (speed) facts.push(`${speed.toFixed(1)} tokens/s`);
  }
  if (ignored) facts.push(`ignored: ${ignored}`);
  usage.append(...facts.map((fact) => made("span", "", fact)));
  view.state.replaceWith(usage);
}

/** Show an answer as it streams; return the response, or null if the stream was cut off. */
async function follow(answer, view, running) {
  const ignored = answer.headers.get("x-unsupported-params");
  let last = null;
  for await (const event of events(answer)) {
    // Do not scroll a reader who has scrolled up.
    const isSeen = view.state.getBoundingClientRect().top < innerHeight;
    const response = view.show(event);
    if (isSeen) view.state.scrollIntoView({ block: "nearest" });
    if (response) last = response;
    if (response) running.id = response.id;
    if (running.isStopped && running.id) askToStop(running);
    if (event.type.endsWith(".delta")) {
      view.state.textContent = `${view.speed().toFixed(1)} tokens/s`;
    }
  }
  if (!last || ["queued", "in_progress"].includes(last.status)) {
    view.fail("The answer was cut off.");
    return null;
  }
  showUsage(view, last, ignored);
  return last;
}

function goOnFrom(response) {
  talk.previous = response.id;
  askForResults(response.output);
  const link = $("in-admin");
  if (link) {
    link.hidden = false;
    link.href = `${link.href.split("?")[0]}?q=${response.id}`;
  }
}

async function send() {
  let asked;
  try {
    asked = body();
  } catch (error) {
    complain(error.message);
    return;
  }
  if (isEmpty(asked)) return;
  complain("");
  talk.last = asked;
  showSent(asked);
  const container = made("div", "answer");
  $("turns").append(container);
  const view = new AnswerView(container);
  const running = { id: null, isStopped: false };
  const own = talk;
  let ended = null;
  setRunning(running);
  message.value = "";
  askForResults([]);
  try {
    const sent = { method: "POST", headers: headers(), body: JSON.stringify(asked) };
    const answer = await fetch(ADDRESS, sent);
    if (answer.ok) ended = await follow(answer, view, running);
    else throw new Error((await answer.json()).error.message);
  } catch (error) {
    view.fail(error.message);
    view.state.remove();
  }
  if (own !== talk) return;
  if (ended) goOnFrom(ended);
  setRunning(null);
  message.focus();
  showCode();
}

async function askToStop(running) {
  if (running.isAsked) return;
  running.isAsked = true;
  await fetch(`${ADDRESS}/${running.id}/stop`, { method: "POST", headers: headers() });
}

/** Stop the running answer; if its id is not known yet, as soon as it is. */
function stop() {
  const running = talk.running;
  if (!running) return;
  running.isStopped = true;
  $("stop").disabled = true;
  if (running.id) askToStop(running);
}

function startAnew() {
  stop();
  talk = newTalk();
  setRunning(null);
  $("turns").replaceChildren();
  askForResults([]);
  showCode();
  message.focus();
}

$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!talk.running) send();
});
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("compose").requestSubmit();
  }
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
settings.addEventListener("submit", (event) => event.preventDefault());
settings.addEventListener("input", showCode);
$("compose").addEventListener("input", showCode);
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", startAnew);
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", () => copy($(button.dataset.copy).textContent));
}
if (matchMedia("(max-width: 50rem)").matches) {
  document.querySelector(".settings-fold").open = false;
}
showCode();
