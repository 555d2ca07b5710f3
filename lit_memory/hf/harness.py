"""Our models in EleutherAI's lm-evaluation-harness, as ``--model lit_memory``.

A context is read segment by segment into the memory, so that no length is too long, and nothing is cut off. Versions of
the harness after 0.4.13 find this class by the entry point of our package (``lm_eval.models``); before them,
``python -m lit_memory.hf.harness`` is the command ``lm_eval`` with this class.

Shape suffixes: B batch, T tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.models.utils_hf import stop_sequences_criteria  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from lit_memory.hf.auto import LitMemoryForCausalLM
from lit_memory.hf.pretrained import locate
from lit_memory.recurrence import Position, at_least_single, pack, read_on, read_prompts, reorder
from lit_memory.text.tokenizers import pretrained_tokenizer
from lit_memory.util.checks import FieldError

COLUMNS = 512
"""Tokens whose logits are held at once."""
Scored = tuple[float, bool]
"""Log-likelihood of a continuation, and whether greedy search gives it."""


@register_model("lit_memory")
class LitMemoryLM(TemplateLM):
    """A model of ours, behind the interface of the harness; one process.

    pretrained: a folder that ``save_pretrained`` wrote, or a name on the Hugging Face hub.
    tokenizer: a folder or name of its tokenizer; default: that beside the model.
    segment_len: tokens per segment; default: that of the folder.
    batch_size: contexts that are read at once.
    device: default CUDA where there is one.
    dtype: of the weights, "float32"; default: that of the folder.
    max_gen_toks: most new tokens where a task names no number.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        segment_len: int | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        max_gen_toks: int = 256,
        revision: str | None = None,
    ) -> None:
        super().__init__()
        if not str(batch_size or 1).isdigit():
            raise FieldError("batch_size", batch_size, "expected a number of contexts")
        self.batch_size, self.max_gen_toks = int(batch_size or 1), max_gen_toks
        folder = locate(pretrained, revision)
        device = device or "cuda"  # the harness asks for cuda:0 wherever it runs
        self._device = torch.device("cpu" if device.startswith("cuda") and not torch.cuda.is_available() else device)
        self.shell: Any = LitMemoryForCausalLM.from_pretrained(folder, dtype=dtype).to(self._device)
        self.segment_len = segment_len or self.shell.config.segment_len
        self.tokenizer: Any = pretrained_tokenizer(tokenizer or str(folder))
        self.name = pretrained

    # Text and tokens

    @property
    def eot_token_id(self) -> int:
        found = self.tokenizer.eos_token_id
        if found is None:
            raise FieldError("tokenizer", self.tokenizer.name_or_path, "it has no end-of-text token; expected one")
        return found

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        begin = self.tokenizer.bos_token
        if add_special_tokens is None and begin and string.startswith(begin):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **options)

    # Scores

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[Scored]:
        asked: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, _) in enumerate(requests):
            asked.setdefault(tuple(context), []).append(i)
        found: dict[int, Scored] = {}
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="log-likelihoods")
        for contexts in parts(sorted(asked, key=len, reverse=True), self.batch_size):
            rows = [row for row, context in enumerate(contexts) for _ in asked[context]]
            numbers = [i for context in contexts for i in asked[context]]
            scores = self.score(contexts, rows, [requests[i][2] for i in numbers])
            for i, score in zip(numbers, scores, strict=True):
                found[i] = score
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
                bar.update()
        bar.close()
        return [found[i] for i in range(len(requests))]

    @torch.no_grad()
    def score(
        self, contexts: Sequence[Sequence[int]], rows: Sequence[int], continuations: Sequence[list[int]]
    ) -> Iterator[Scored]:
        """Scores of continuations, each of the context ``rows[i]``. A context is read once for all of its own."""
        model = self.shell.model
        hidden_B1D, position = read_prompts(model, pack(*self.padded(contexts)), self.segment_len)
        for own in parts(range(len(rows)), self.batch_size):
            idx = torch.tensor([rows[i] for i in own], device=self._device)
            yield from self.continued(hidden_B1D[idx], reorder(model, position, idx), [continuations[i] for i in own])

    def continued(self, hidden_B1D: Tensor, position: Position, continuations: Sequence[list[int]]) -> list[Scored]:
        """Scores of continuations, read piece by piece. hidden_B1D: of the token before each."""
        ids_BT, mask_BT = self.padded(continuations)
        sums_B = torch.zeros(len(ids_BT), dtype=torch.float64)
        greedy_B = torch.ones(len(ids_BT), dtype=torch.bool)
        step = self.segment_len or ids_BT.shape[1]
        for begin in range(0, ids_BT.shape[1], step):
            piece_BT = ids_BT[:, begin : begin + step]
            more_BTD, position = read_on(self.shell.model, position, piece_BT)
            before_BTD, hidden_B1D = torch.cat([hidden_B1D, more_BTD[:, :-1]], dim=1), more_BTD[:, -1:]
            real_BT = mask_BT[:, begin : begin + step]
            for hidden_BTD, ids, real in zip(
                before_BTD.split(COLUMNS, 1), piece_BT.split(COLUMNS, 1), real_BT.split(COLUMNS, 1), strict=True
            ):
                logits_BTV = at_least_single(self.shell.model.logits(hidden_BTD))
                scores_BT = F.log_softmax(logits_BTV, dim=-1).gather(2, ids[:, :, None])[:, :, 0]
                sums_B += scores_BT.masked_fill(~real, 0).sum(1).cpu()
                greedy_B &= ((logits_BTV.argmax(-1) == ids) | ~real).all(1).cpu()
        return list(zip(sums_B.tolist(), greedy_B.tolist(), strict=True))

    def padded(self, samples: Sequence[Sequence[int]], left: bool = False) -> tuple[Tensor, Tensor]:
        """Samples of tokens (B, T) with padding on one side, and True at real tokens."""
        longest, rows = max(map(len, samples)), []
        for sample in samples:
            fill = [0] * (longest - len(sample))
            rows.append([*fill, *sample] if left else [*sample, *fill])
        lengths_B = torch.tensor([len(sample) for sample in samples], device=self._device)
        mask_BT = torch.arange(longest, device=self._device) < lengths_B[:, None]
        return torch.tensor(rows, device=self._device), mask_BT.flip(1) if left else mask_BT

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, each after the prefix token, with one memory from their first token to their
        last."""
        texts = [request.args[0] for request in requests]
        rows = [(None, [self.prefix_token_id], self.tok_encode(text)) for text in texts]
        scored = iter(self._loglikelihood_tokens([row for row in rows if row[2]], disable_tqdm))
        found = [next(scored)[0] if row[2] else 0.0 for row in rows]
        for text, score in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score)
        return found

    # Generation

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: dict[int, str] = {}
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (repr(requests[i].args[1]), -len(prompts[i])))
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="generations")
        while order:
            options = requests[order[0]].args[1]
            part = [i for i in order[: self.batch_size] if requests[i].args[1] == options]
            order = order[len(part) :]
            for i, text in zip(part, self.generated([prompts[i] for i in part], options), strict=True):
                found[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
                bar.update()
        bar.close()
        return [found[i] for i in range(len(requests))]

    def generated(self, prompts: Sequence[list[int]], options: dict[str, Any]) -> list[str]:
        """Texts after prompts, up to the first of the strings that end them. options: those of a task."""
        settings: Any = normalize_gen_kwargs(options, self.max_gen_toks)
        end = self.tokenizer.decode([self.eot_token_id])
        until = [text for text in handle_stop_sequences(settings.pop("until", None), end) if text]
        ids_BT, mask_BT = self.padded(prompts, left=True)
        if not settings.get("do_sample"):
            settings.pop("temperature", None)
        new_BT = self.shell.generate(
            ids_BT,
            attention_mask=mask_BT.long(),
            segment_len=self.segment_len,
            max_new_tokens=settings.pop("max_gen_toks"),
            stopping_criteria=stop_sequences_criteria(self.tokenizer, until, *ids_BT.shape[::-1]),
            eos_token_id=self.eot_token_id,
            pad_token_id=self.eot_token_id,
            **settings,
        )[:, ids_BT.shape[1] :]
        texts = self.tokenizer.batch_decode(new_BT, skip_special_tokens=True)
        return [postprocess_generated_text(text, until, None) for text in texts]


def parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Items in pieces of at most ``size``."""
    return (items[i : i + size] for i in range(0, len(items), size))


if __name__ == "__main__":
    cli_evaluate()
