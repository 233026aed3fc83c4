"""What ``soak_serve`` does after the load: every answer against its prompt alone, and the proof that pages matter."""

import asyncio
import time

from soak_load import WIDTH, pack, unpack


class Found:
    """What the checks have found so far; a report of it can be written at any time."""

    def __init__(self):
        self.prompts = self.prompts_alone = self.answers = self.equal = 0
        self.read, self.read_whole, self.seconds = 0, 0, 0.0
        self.differing, self.nearest = [], []

    def figures(self, rows=100):
        """All of it; of the answers that differ those that are farthest behind."""
        worst = sorted(self.differing, key=lambda d: -d["most_behind"])
        return {
            "prompts": self.prompts, "prompts_alone": self.prompts_alone, "answers": self.answers, "equal": self.equal,
            "differ": sum(d["requests"] for d in worst), "distinct_differing": len(worst), "read_again": self.read,
            "read_again_whole": self.read_whole, "seconds": round(self.seconds, 1),
            "closest_choice_of_a_solo": round(min(self.nearest, default=0.0), 5), "differing": worst[:rows],
        }  # fmt: skip


def paths(answers):
    """The answers that are no other's beginning."""
    longest = []
    for tokens in sorted(answers, key=len, reverse=True):
        if not any(other.startswith(tokens) for other in longest):
            longest.append(tokens)
    return longest


class Checks:
    """The part of the soak that runs when the load is over."""

    held = False

    async def empty(self):
        """Drop the prefix cache; False while a block is held."""
        for _ in range(1 if self.held else 40):
            if await self.engine.reset_prefix_cache():
                if "kv_transfer_config" not in self.args.engine:
                    return True
                # a connector's pages as well: once, as OffloadingConnector takes no second time before the next step
                return await self.engine.reset_prefix_cache(reset_connector=True)
            await asyncio.sleep(0.05)  # a request that just ended may have a step under way
        self.held = True  # and will be: the next one need not wait
        return False

    async def solo(self, prompt, new):
        """Tokens of a prompt that is alone in the engine, and how far each was ahead of the next best."""
        if not await self.empty():
            self.errors.append("the prefix cache could not be dropped: blocks are held, and no request runs")
        answer = (await self.generate(prompt, max_tokens=new, logprobs=2)).outputs[0]
        ahead = []
        for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
            ahead.append(found[token].logprob - max(x.logprob for t, x in found.items() if t != token))
        return pack(answer.token_ids), ahead

    async def behind(self, prompt, tokens, cached=False):
        """How much less likely than the best one each token of an answer is, read in one piece.

        ``cached``: with the pages of the prompt that the cache holds, and None where nothing was computed: a token has
        a probability if the one before it was not in the cache.
        """
        if not cached:
            await self.empty()
        # the engine reads a prompt whole if its probabilities are asked, unless it is told otherwise
        options = {"prompt_logprobs": 1, "skip_reading_prefix_cache": not cached, "flat_logprobs": True}
        whole = await self.generate(prompt + tokens, max_tokens=1, **options)
        ids, start = unpack(tokens), len(prompt) // WIDTH
        known = min(len(ids), start + len(ids) - 1 - (whole.num_cached_tokens or 0 if cached else 0))
        gaps = [None] * (len(ids) - known)
        # from the end: what stands in the places of cached tokens, and whether they have places, is not defined
        for back in range(known, 0, -1):
            at = whole.prompt_logprobs[len(whole.prompt_logprobs) - back]
            told = at.get(ids[-back])
            gaps.append(None if told is None else max(x.logprob for x in at.values()) - told.logprob)
        if not cached and None in gaps:
            raise RuntimeError(f"the engine gave no probability of token {gaps.index(None)} of an answer")
        return gaps

    def at_once(self, prompt, tokens):
        """Readings of answers to one prompt that fit into the pool together."""
        block = self.args.block * WIDTH
        own = -(-(len(tokens) + WIDTH) // block) + 1
        return max(1, min(self.args.seqs, (self.blocks - len(prompt) // block) // own))

    async def read(self, prompt, firsts):
        """How much less likely than the best one the tokens of answers are, from those on that differ from the solo.

        Many at a time, with the pages that the prompt's solo left. What an answer has in common with one before it is
        read once, so that the table of what is known goes by the tokens up to and with the one in question.
        """
        known, longest = {}, paths(firsts)
        room = asyncio.Semaphore(self.at_once(prompt, max(longest, key=len)))

        def learn(tokens, gaps):
            known.update((tokens[: WIDTH * (i + 1)], gap) for i, gap in enumerate(gaps) if gap is not None)

        async def one(tokens):
            async with room:
                learn(tokens, await self.behind(prompt, tokens, cached=True))

        await asyncio.gather(*map(one, longest))
        self.found.read += len(longest)
        found = {}
        for tokens, first in sorted(firsts.items(), key=lambda item: -len(item[0])):
            steps = [tokens[: WIDTH * (i + 1)] for i in range(first, len(tokens) // WIDTH)]
            if any(step not in known for step in steps):
                learn(tokens, await self.behind(prompt, tokens))
                self.found.read_whole += 1
            found[tokens] = [known[step] for step in steps]
        return found

    async def check(self):
        """Every answer against the run of its prompt alone, those that most requests got first.

        Until ``--check-seconds`` are over. Returns the prompts.
        """
        given, found = {}, self.found
        for request in self.requests:
            if request.tokens:
                given.setdefault(request.prompt, {}).setdefault(request.tokens, []).append(request)
        order = sorted(given, key=lambda p: -sum(map(len, given[p].values())))
        found.prompts, found.answers = len(given), sum(len(r) for a in given.values() for r in a.values())
        begun = said = time.monotonic()
        # a step for each token, and some for the prompt
        cost = {p: max(map(len, answers)) + len(p) / 32 for p, answers in given.items()}
        spent, whole = 0.0, sum(cost.values())
        for prompt in order:
            if found.seconds >= self.args.check_seconds:
                break
            await self._check_prompt(prompt, given[prompt])
            found.prompts_alone += 1
            spent += cost[prompt]
            found.seconds = time.monotonic() - begun
            if time.monotonic() - said > self.args.every:
                said = time.monotonic()
                left = found.seconds * (whole / spent - 1)
                self.say(
                    f"{found.prompts_alone} of {found.prompts} prompts alone, some {left:.0f} s to go; {found.equal} "
                    f"answers equal, {len(found.differing)} differ, {found.read_whole} of them read whole"
                )
        return order

    async def _check_prompt(self, prompt, answers):
        found = self.found
        want, ahead = await self.solo(prompt, max(map(len, answers)) // WIDTH)
        found.nearest.append(min(ahead))
        firsts = {}
        for tokens, requests in answers.items():
            if want.startswith(tokens):
                found.equal += len(requests)
            else:
                ours, alone = unpack(tokens), unpack(want)
                firsts[tokens] = next(i for i, token in enumerate(ours) if token != alone[i])
        if not firsts:
            return
        for tokens, behind in (await self.read(prompt, firsts)).items():
            first, requests = firsts[tokens], answers[tokens]
            row = {"requests": len(requests), "ended": sorted({r.ended for r in requests}),
                   "prompt_tokens": len(prompt) // WIDTH, "tokens": len(tokens) // WIDTH, "first": first,
                   "solo_ahead": round(ahead[first], 5), "most_behind": round(max(behind), 5),
                   "token_behind": round(behind[0], 5)}  # fmt: skip
            found.differing.append(row)
            if row["most_behind"] > self.args.tie:
                self.say(f"WRONG: {row}")

    async def control(self, prompts):
        """With another's pages in the place of a cached prompt's: whether its answer changes, and by how much."""
        found = []
        for prompt in sorted(prompts, key=len, reverse=True)[:4]:
            want, _ = await self.solo(prompt, self.args.answer)
            other = max((p for p in prompts if p != prompt), key=len)
            await self.generate(other, max_tokens=1)  # so that the blocks around are not empty
            before = self.watch.hits
            await self.engine.collective_rpc("soak_exchange_pages")
            got = pack((await self.generate(prompt, max_tokens=self.args.answer)).outputs[0].token_ids)
            hits = self.watch.hits - before
            behind = max(await self.behind(prompt, got))
            found.append({"changed": got != want, "hit_tokens": hits, "most_behind": round(behind, 5)})
        await self.empty()
        return found

    async def plant(self):
        """Exchange two pages now and then from the middle of the load on, for ``--plant pages``."""
        await asyncio.sleep(self.args.seconds / 2)
        while self.args.plant == "pages":
            pair = self.rng.sample(range(1, self.blocks + 1), 2)
            await self.engine.collective_rpc("soak_exchange_pages", args=(pair,))
            await asyncio.sleep(self.args.seconds / 40)
