import { Ollama } from "ollama";
import { getWeather, holds, key, model, small, step, sunny, url, weather } from "./report.mjs";

const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });

await step("chat", async () => {
  const answer = await client.chat({ model: small, messages: [{ role: "user", content: "Hello" }], options: { num_predict: 20 } });
  if (!answer.message.content) throw new Error("no text");
});
await step("stream", async () => {
  let text = "";
  for await (const piece of await client.generate({ model: small, prompt: "Hello", stream: true, options: { num_predict: 20 } })) text += piece.response;
  if (!text) throw new Error("no text");
});
await step("tool loop", async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } } };
  const tools = [{ type: "function", function: { name: "get_weather", description: "", parameters } }];
  const messages = [{ role: "user", content: weather }];
  const { message } = await client.chat({ model, messages, tools });
  messages.push(message, { role: "tool", tool_name: "get_weather", content: getWeather(message.tool_calls[0].function.arguments) });
  holds((await client.chat({ model, messages, tools })).message.content, sunny);
});
