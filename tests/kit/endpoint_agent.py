"""An agent that knows an endpoint like OpenAI's and nothing of verl. It runs as a coroutine that a gateway starts."""

import httpx


async def run(*, raw_prompt, session, sample_index, **_):
    """Two turns, a sub-agent whose text goes back to the first context, and a last turn after the context was summed up."""
    asked = [dict(message) for message in raw_prompt]
    async with httpx.AsyncClient(timeout=600) as client:

        async def said(messages):
            given = {"model": "policy", "messages": messages, "max_tokens": 6}
            answer = await client.post(f"{session.base_url}/chat/completions", json=given)
            answer.raise_for_status()
            return answer.json()["choices"][0]["message"]

        first = await said(asked)
        helper = await said([{"role": "user", "content": "Help."}])
        second = await said([*asked, first, {"role": "user", "content": f"It says: {helper['content']}"}])
        last = await said([*asked[:-1], {"role": "user", "content": f"So far: {second['content']}"}])
        reward = float(len(last["content"] or "") % 2)
        answer = await client.post(session.reward_info_url, json={"reward_info": {"reward": reward}})
        answer.raise_for_status()
