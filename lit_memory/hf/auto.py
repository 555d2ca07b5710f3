"""Our models as Hugging Face's: the configuration and the model that the Auto classes of transformers load from the
folders of ``save_pretrained``.

Shape suffixes: B batch, T tokens, D width, V vocabulary.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from lit_memory.hf.pretrained import MODEL_TYPE, read_settings, shared_weights
from lit_memory.hf.reading import preview
from lit_memory.recurrence import pack, unroll


class LitMemoryConfig(PreTrainedConfig):
    """The content of config.json.

    arch: registered name of the architecture. settings: fields of its ``Config``. segment_len: tokens per segment where
        a call gives none; default: one segment for all.
    """

    model_type = MODEL_TYPE

    def __init__(
        self, arch: str = "armt", settings: dict[str, Any] | None = None, segment_len: int | None = None, **others: Any
    ) -> None:
        self.arch, self.settings, self.segment_len = arch, settings or {}, segment_len
        self.vocab_size = self.settings.get("vocab_size")
        super().__init__(**others)


class LitMemoryForCausalLM(PreTrainedModel, GenerationMixin):
    """Any of our models, as ``.model``, behind the interface of a Hugging Face causal language model.

    ``generate`` is Hugging Face's and computes every step from scratch; ``.model.generate`` is ours and keeps the
    memory.
    """

    config_class = LitMemoryConfig
    base_model_prefix = "model"

    def __init__(self, config: LitMemoryConfig) -> None:
        super().__init__(config)
        cls, settings = read_settings(config.arch, config.settings)
        self.model = cls(cls.Config(**settings))
        self._tied_weights_keys = {
            f"model.{name}": f"model.{kept}" for name, kept in shared_weights(self.model).items()
        }
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """``PreTrainedModel.from_pretrained``, but a missing or surplus weight is a ValueError, not a warning, and no
        Python code of a folder is run, whatever ``options`` say: our models have none."""
        options.pop("trust_remote_code", None)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, trust_remote_code=False, **options)
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys"):
            if info[problem]:
                names = preview(info[problem])
                raise ValueError(
                    f"{model.name_or_path}: {problem}: {names}; expected the weights that config.json asks for"
                )
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the model is initialised when it is built, and no weight may be missing from a folder."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        segment_len: int | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits (B, T, V), and with ``labels`` (B, T; -100 is ignored) the mean cross-entropy of predicting label t+1
        at token t.

        attention_mask: (B, T), nonzero at real tokens. Padding, on either side, does not change a sample's results.
        segment_len: tokens per segment; default: ``config.segment_len``.
        """
        prompts = pack(input_ids, attention_mask)
        hidden_BTD = unroll(
            self.model, prompts.ids_BT, segment_len or self.config.segment_len, mask_BT=prompts.mask()
        ).hidden_BTD
        logits = self.model.logits(hidden_BTD.take_along_dim(prompts.order_BT.argsort(dim=1)[:, :, None], dim=1))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        out = CausalLMOutput(loss=loss, logits=logits)
        return out.to_tuple() if return_dict is False else out

    def generate(self, *args: Any, **options: Any) -> Any:
        """``GenerationMixin.generate`` without its cache of keys and values, which our models do not have."""
        return super().generate(*args, **{"use_cache": False, **options})  # type: ignore[misc]

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, segment_len: int | None = None, **_: Any
    ) -> dict[str, Any]:
        """Arguments of ``forward`` for the next token: the whole sequence each time."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "segment_len": segment_len}
