import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { getWeather, holds, key, model, step, sunny, url, weather } from "./report.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
const tools = [
  tool({ name: "get_weather", description: "Get the weather", parameters: z.object({ city: z.string() }), execute: getWeather }),
];

for (const [name, Model] of [["responses", OpenAIResponsesModel], ["chat completions", OpenAIChatCompletionsModel]]) {
  await step(`${name}: tool loop`, async () => {
    const agent = new Agent({ name: "a", model: new Model(client, model), tools });
    holds((await run(agent, weather)).finalOutput, sunny);
  });
}
