"""Exactness per capability on held-out prompts, on the real engine.

  python make_corpus.py --n 6000 --seed 999 --heldout --out heldout.jsonl
  python eval.py ../demo-q8_0.gguf [--per 40]
"""
import argparse
import collections
import json
import time
from concurrent.futures import ThreadPoolExecutor

import xllamacpp as x

p = argparse.ArgumentParser()
p.add_argument("model")
p.add_argument("--per", type=int, default=40)
p.add_argument("--data", default="heldout.jsonl")
p.add_argument("--show", type=int, default=3)
p.add_argument("--cap")
a = p.parse_args()
P = x.CommonParams()
P.model.path, P.n_ctx, P.n_parallel, P.warmup, P.port, P.verbosity, P.use_jinja = a.model, 8 * 2048, 8, False, 0, -1, True
P.cpuparams.n_threads = 1
srv = x.Server(P)
rows, cnt = [], collections.Counter()
for line in open(a.data):
    r = json.loads(line)
    if r["think"] is None or cnt[r["cap"]] >= a.per or (a.cap and r["cap"] != a.cap):
        continue
    cnt[r["cap"]] += 1
    rows.append(r)


def wire(m):
    m = dict(m)
    if m.get("tool_calls"):
        m["tool_calls"] = [{"id": f"c{i}", "type": "function", "function": {"name": t["function"]["name"], "arguments": json.dumps(t["function"]["arguments"])}}
                           for i, t in enumerate(m["tool_calls"])]
    if m["role"] == "tool":
        m["tool_call_id"] = "c0"
    return m


def run(r):
    d = {"messages": [wire(m) for m in r["messages"][:-1]], "temperature": 0, "max_tokens": 450, "chat_template_kwargs": {"enable_thinking": r["think"]}}
    if r["tools"]:
        d["tools"] = r["tools"]
    try:
        c = srv.handle_chat_completions(d)["choices"][0]
    except Exception as e:
        return r, {"content": repr(e)}, "error", False
    m, t = c["message"], r["messages"][-1]
    calls = [(k["function"]["name"], k["function"]["arguments"]) for k in m.get("tool_calls") or []]
    try:
        calls = [(n, json.loads(v)) for n, v in calls]
    except ValueError:
        pass
    want = [(k["function"]["name"], k["function"]["arguments"]) for k in t.get("tool_calls") or []]
    if r["cap"] in ("story", "joke"):
        ok = c["finish_reason"] == "stop" and len(m.get("content") or "") > 30
    else:
        ok = (m.get("content") or "").strip() == t["content"].strip() and calls == want
    ok = ok and c["finish_reason"] in ("stop", "tool_calls") and bool(m.get("reasoning_content")) == r["think"]
    return r, m, c["finish_reason"], ok


t0 = time.time()
with ThreadPoolExecutor(8) as ex:
    res = list(ex.map(run, rows))
by = collections.defaultdict(lambda: [0, 0, 0, 0])
shown = collections.Counter()
for r, m, fin, ok in res:
    by[r["cap"]][0 + r["think"]] += ok
    by[r["cap"]][2 + r["think"]] += 1
    if not ok and shown[r["cap"]] < a.show:
        shown[r["cap"]] += 1
        print("MISS", r["cap"], "|", json.dumps([k["content"] or k.get("tool_calls") for k in r["messages"][-4:]], ensure_ascii=False)[-400:], "\n   GOT", fin, json.dumps(m, ensure_ascii=False)[:300])
tot = [0, 0]
for k, (o0, o1, n0, n1) in sorted(by.items()):
    print(f"| {k} | {o0}/{n0} | {o1}/{n1} | {100 * (o0 + o1) / (n0 + n1):.0f}% |")
    tot[0] += o0 + o1
    tot[1] += n0 + n1
print(f"| all | | | {100 * tot[0] / tot[1]:.1f}% of {tot[1]} |  {time.time() - t0:.0f}s")
