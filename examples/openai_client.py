"""OpenAI's own client on `kvpolicy serve`: the policy is swapped under a stream, and no token changes."""

import re
import subprocess
import sys
from pathlib import Path

import openai  # pip install openai

CONFIG = Path(__file__).with_name("serve.yaml")
PROMPT = "def read_config(path):\n    "
POLICIES = [
    {"controller": "static", "parameters": {"device_buffer_rows": 160}},
    {"controller": "hisparse", "eviction": "lru"},
    {"controller": "resident", "eviction": None},
]

start = "from kvpolicy.cli.start import main; main()"  # what the command `kvpolicy` runs
arguments = ["serve", "--config", str(CONFIG), "--port", "0"]
server = subprocess.Popen(
    [sys.executable, "-c", start, *arguments], stdout=subprocess.PIPE, text=True
)
try:
    line = server.stdout.readline()
    url = re.search(r"http://\S+", line)[0]
    with openai.OpenAI(base_url=url, api_key="none") as client:
        ask = {
            "model": "tiny-dsa",
            "prompt": PROMPT,
            "max_tokens": 40,
            "temperature": 0.7,
            "seed": 1,
        }
        undisturbed = client.completions.create(**ask).choices[0].text
        swapped = ""
        for number, event in enumerate(client.completions.create(**ask, stream=True)):
            swapped += event.choices[0].text
            if number % 10 == 5 and number // 10 < len(POLICIES):
                found = client.put(
                    "/policy", body=POLICIES[number // 10], cast_to=dict[str, object]
                )
                print(
                    f"after {number + 1} pieces: {found['controller']}, changed {found['changed']}"
                )
        print(PROMPT + swapped)
        assert swapped == undisturbed, "a policy may not change one token"
finally:
    server.terminate()  # drains, then ends
    server.communicate(timeout=60)
assert server.returncode == 0
