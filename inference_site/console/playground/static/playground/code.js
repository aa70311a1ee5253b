// The playground's request as curl and as Python, with images shortened.

function shortened(key, value) {
  const isImage = typeof value === "string" && value.startsWith("data:image/");
  return isImage ? `${value.slice(0, value.indexOf(",") + 1)}...` : value;
}

/** Return the request as a shell command with curl. */
export function asCurl(origin, body) {
  const quoted = JSON.stringify(body, shortened, 2).replaceAll("'", "'\\''");
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
export function asPython(origin, given) {
  const body = JSON.parse(JSON.stringify(given, shortened));
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
