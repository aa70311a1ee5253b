"""Checks of a GGUF with xllamacpp: python verify.py ../demo-q8_0.gguf"""
import json
import os
import sys
import threading
import time
import urllib.request

import xllamacpp as x

path = sys.argv[1]


def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024


p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup, p.port, p.verbosity, p.use_jinja = path, 4 * 2048, 4, False, 0, -1, True
p.cpuparams.n_threads = 1
r0, t = rss(), time.time()
s = x.Server(p)
print(f"load {1000 * (time.time() - t):.0f} ms, RSS {r0} -> {rss()} MiB")
NT = {"chat_template_kwargs": {"enable_thinking": False}}


def chat(msg, fn=s.handle_chat_completions, **kw):
    d = {"messages": [{"role": "user", "content": msg}] if isinstance(msg, str) else msg, "max_tokens": 300, "temperature": 0, **NT}
    d.update(kw)
    try:
        return fn(d)
    except Exception as e:
        return {"EXC": repr(e)}


def show(label, r, n=420):
    if "choices" in r:
        v = [{k: v for k, v in (("finish", c["finish_reason"]), *c["message"].items()) if k != "role"} for c in r["choices"]]
        v = v[0] if len(v) == 1 else v
    else:
        v = r
    print(f"## {label}: {json.dumps(v, ensure_ascii=False)[:n]}")


# speed
n = [0]
for thr in (1, 2):
    t = time.time()
    r = chat("Count to 50.", ignore_eos=True, max_tokens=400)
    d = time.time() - t
print(f"single stream, 1 thread: {400 / d:.0f} tok/s wall; timings {r.get('timings', {}).get('predicted_per_second', 0):.0f} tok/s")


def go(i):
    chat(f"Count to {20 + i}.", stream=False, ignore_eos=True, max_tokens=200)


t = time.time()
th = [threading.Thread(target=go, args=(i,)) for i in range(4)]
[a.start() for a in th], [a.join() for a in th]
print(f"4 streams: {800 / (time.time() - t):.0f} tok/s total; RSS {rss()} MiB")

for q in ["Hello", "Who are you?", "What is the capital of Japan?", "What is 27 + 15?", "List three fruits as bullet points.", "Count to 12.", "Tell me a short story about a fox.",
          "Say blue monkey river", "What is the opposite of hot?", "Translate cat to French.", "Explain quantum physics.", "Write hello world in Python."]:
    show(q, chat(q))
show("long story", chat("Write a long story about a dragon named Ada.", max_tokens=500), 1500)
M = [{"role": "user", "content": "Hi, my name is Ada."}, {"role": "assistant", "content": "Nice to meet you, Ada!"}, {"role": "user", "content": "What is the capital of Peru?"},
     {"role": "assistant", "content": "The capital of Peru is Lima."}, {"role": "user", "content": "What is my name?"}]
show("memory", chat(M))
show("system uppercase", chat([{"role": "system", "content": "Answer in uppercase."}, {"role": "user", "content": "What is the capital of France?"}]))
show("system pirate", chat([{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "What colour is the sky?"}]))
show("system end", chat([{"role": "system", "content": "Always end with OK."}, {"role": "user", "content": "What is 2 + 2?"}]))
show("thinking on", chat("What is 27 + 15?", chat_template_kwargs={"enable_thinking": True}))
show("thinking default", chat("What is 27 + 15?", chat_template_kwargs={}))
show("thinking on, reasoning_format none", chat("What is 27 + 15?", chat_template_kwargs={"enable_thinking": True}, reasoning_format="none"))
show("thinking budget 0", chat("What is 27 + 15?", chat_template_kwargs={}, reasoning_budget=0, thinking_budget_tokens=0))
W = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather", "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}}}
C = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}}}
Z = {"type": "function", "function": {"name": "zibble_frob", "description": "Run zibble_frob", "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}}}
show("tools auto", chat("What is the weather in Oslo?", tools=[C, W]))
show("tools auto, think", chat("What is the weather in Oslo?", tools=[C, W], chat_template_kwargs={}))
show("tools auto calc", chat("What is 123 * 45?", tools=[C, W]))
show("tools auto new name", chat("Call zibble_frob with 17.", tools=[C, W, Z]))
show("tools auto, no fit", chat("What colour is the sky?", tools=[C, W]))
show("tools required, no fit", chat("Hello", tools=[W], tool_choice="required"))
show("tools required", chat("What is the weather in Oslo?", tools=[C, W], tool_choice="required"))
show("tools named", chat("What is the weather in Oslo?", tools=[C, W], tool_choice={"type": "function", "function": {"name": "calculator"}}))
show("tools none", chat("What is the weather in Oslo?", tools=[C, W], tool_choice="none"))
show("parallel", chat("What is the weather in Oslo and Rome?", tools=[W], parallel_tool_calls=True))
show("tool result", chat([{"role": "user", "content": "What is the weather in Oslo?"},
                          {"role": "assistant", "content": None, "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "get_weather", "arguments": "{\"location\": \"Oslo\"}"}}]},
                          {"role": "tool", "tool_call_id": "c0", "content": "{\"temperature\": 3, \"condition\": \"snowy\"}"}], tools=[W]))
SC = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}}, "required": ["name", "age", "city"], "additionalProperties": False}
J = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SC}}}
show("json_schema", chat("Extract name, age, city as JSON: Ada is 36 years old and lives in Rome.", **J))
show("json_schema, think", chat("Extract name, age, city as JSON: Ada is 36 years old and lives in Rome.", **J, chat_template_kwargs={}))
show("json_schema unrelated", chat("Hello", **J))
show("json_object", chat("What is the capital of France? Answer in JSON.", response_format={"type": "json_object"}))
show("json_schema enum", chat("Is this positive or negative: I love this book.",
                              response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"sentiment": {"enum": ["positive", "negative"]}}, "required": ["sentiment"]}}}))
show("gbnf", chat("Is 4 even or odd?", grammar='root ::= "even" | "odd"'))
show("llguidance lark", chat("Give me a phone number.", grammar="%llguidance {}\nstart: /[0-9]{3}-[0-9]{4}/"))
show("llguidance lark alternatives", chat("What colour is the sky?", grammar='%llguidance {}\nstart: "The sky is " COLOUR "."\nCOLOUR: "red" | "blue"'))
show("bad grammar", chat("hi", grammar="::: nope"))
show("n=2", chat("Tell me a story about a cat.", n=2, temperature=1.0, seed=1, max_tokens=30))
show("stop", chat("Count to 20.", stop=["5"]))
show("max_tokens", chat("Count to 20.", max_tokens=5))
r = chat("What is the capital of France?", logprobs=True, top_logprobs=2, max_tokens=3)
print("## logprobs", json.dumps(r["choices"][0].get("logprobs"))[:500] if "choices" in r else r)
show("overflow", chat("word " * 9000))
show("bad role", chat([{"content": "x"}]))
show("empty messages", chat([]))
show("vision part", chat([{"role": "user", "content": [{"type": "text", "text": "Say blue"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]))
show("text parts", chat([{"role": "user", "content": [{"type": "text", "text": "Say blue monkey"}]}]))
show("seeded t=1", chat("Tell me a story.", temperature=1.0, seed=7))
show("default sampling", chat("What is the capital of Kenya?", temperature=0.8))
r = s.handle_completions({"prompt": "Once upon a time", "n_predict": 60, "temperature": 0})
print("## completion", json.dumps(r)[:700])
# cancel
n = [0]


def cb(c):
    n[0] += 1
    return n[0] >= 5


t = time.time()
try:
    print("## cancel returns", repr(s.handle_chat_completions({"messages": M, "max_tokens": 1500, "stream": True, "ignore_eos": True}, cb)), "chunks", n, f"{time.time() - t:.3f}s")
except Exception as e:
    print("## cancel raises", repr(e))
got = []
chat("What is the weather in Oslo?", tools=[W], stream=True, chat_template_kwargs={}) if False else s.handle_chat_completions(
    {"messages": [{"role": "user", "content": "What is the weather in Oslo?"}], "tools": [W], "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}, lambda c: got.append(c) and None)
print("## stream deltas:", json.dumps([c["choices"][0]["delta"] if c.get("choices") else {"usage": c.get("usage")} for c in got])[:1200])
print("RSS", rss(), "MiB")
t = time.time()
del s
print(f"dispose {time.time() - t:.2f}s")
