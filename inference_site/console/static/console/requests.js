// The playground's request: built from the form, and written as curl and Python.

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed",
  "max_output_tokens",
];

function json(fields, name, label) {
  const text = fields.get(name).trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
}

/** Return the form as a request body; throw an Error for invalid JSON. */
export function settingsOf(form) {
  const fields = new FormData(form);
  const body = { model: fields.get("model") };
  if (fields.get("instructions").trim()) body.instructions = fields.get("instructions");
  for (const name of NUMBERS) {
    if (fields.get(name) !== "") body[name] = Number(fields.get(name));
  }
  if (fields.get("effort")) body.reasoning = { effort: fields.get("effort") };
  const tools = json(fields, "tools", "Tools");
  if (tools !== undefined) body.tools = tools;
  const schema = json(fields, "schema", "JSON schema");
  if (schema !== undefined) body.text = { format: { type: "json_schema", name: "answer", schema } };
  return body;
}

/** Return the request as a shell command with curl. */
export function asCurl(origin, body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl -N ${origin}/v1/responses \\`,
    `  -H "Authorization: Bearer $API_KEY" \\`,
    `  -H 'Content-Type: application/json' \\`,
    `  -d '${quoted}'`,
  ].join("\n");
}

const OWN = new Set([
  "model", "input", "instructions", "previous_response_id", "temperature", "top_p",
  "max_output_tokens", "reasoning", "tools", "text", "store", "stream",
]);

function python(value, indent = "") {
  const deeper = `${indent}    `;
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return `[\n${value.map((one) => `${deeper}${python(one, deeper)},\n`).join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const pairs = Object.entries(value);
    if (!pairs.length) return "{}";
    const lines = pairs.map(([k, v]) => `${deeper}${JSON.stringify(k)}: ${python(v, deeper)},\n`);
    return `{\n${lines.join("")}${indent}}`;
  }
  return JSON.stringify(value);
}

/** Return the request as a Python program that uses the official client. */
export function asPython(origin, body) {
  const own = Object.entries(body).filter(([name]) => OWN.has(name));
  const extra = Object.entries(body).filter(([name]) => !OWN.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${python(value, "    ")},`);
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra), "    ")},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key=os.environ["API_KEY"])`,
    "stream = client.responses.create(",
    ...lines,
    ")",
    "for event in stream:",
    '    if event.type == "response.output_text.delta":',
    '        print(event.delta, end="", flush=True)',
  ].join("\n");
}
