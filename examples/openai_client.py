"""Stream a chat answer from a server started by
``vllm serve MODEL --speculative-model [lookahead]``: ``python examples/openai_client.py``."""

from openai import OpenAI


def main() -> None:
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Write a haiku about the sea."}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
