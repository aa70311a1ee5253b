import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";
import { getWeather, holds, key, model, step, sunny, url, weather } from "./report.mjs";

const tools = [tool(getWeather, { name: "get_weather", description: "Get the weather", schema: z.object({ city: z.string() }) })];
const messages = [{ role: "user", content: weather }];

for (const [name, useResponsesApi] of [["chat completions", false], ["responses", true]]) {
  const played = new ChatOpenAI({ model, apiKey: key, useResponsesApi, configuration: { baseURL: `${url}/v1` } });
  await step(`${name}: tool loop`, async () => {
    const { messages: said } = await createAgent({ model: played, tools }).invoke({ messages });
    holds(said.at(-1).text, sunny);
  });
  await step(`${name}: stream`, async () => {
    let text = "";
    for await (const [piece] of await createAgent({ model: played, tools }).stream({ messages }, { streamMode: "messages" })) text += piece.text;
    holds(text, sunny);
  });
}
