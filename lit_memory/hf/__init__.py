"""Everything Hugging Face. Importing this package registers our models with the Auto classes of transformers."""

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lit_memory.hf.auto import LitMemoryConfig, LitMemoryForCausalLM

AutoConfig.register(LitMemoryConfig.model_type, LitMemoryConfig, exist_ok=True)
AutoModelForCausalLM.register(LitMemoryConfig, LitMemoryForCausalLM, exist_ok=True)
# The Trainer smooths the labels of the next tokens, not of the present ones, only for the classes in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LitMemoryConfig.model_type] = LitMemoryForCausalLM.__name__
