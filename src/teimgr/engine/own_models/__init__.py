"""Architectures that transformers lacks, with the names of the weights in their files.

Each has a folder as in transformers' `models`. The fields of its configuration class are the keys that it reads of
config.json (`models/known_keys`), after `models/own_code` has converted that.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from teimgr.engine.own_models.jina_bert.configuration_jina_bert import JinaBertConfig
from teimgr.engine.own_models.jina_bert.modeling_jina_bert import JinaBertForSequenceClassification, JinaBertModel
from teimgr.engine.own_models.nomic_bert_moe.configuration_nomic_bert_moe import NomicBertMoeConfig
from teimgr.engine.own_models.nomic_bert_moe.modeling_nomic_bert_moe import NomicBertMoeModel


def register_own_models() -> None:
    """Make transformers' Auto classes know them."""
    AutoConfig.register(JinaBertConfig.model_type, JinaBertConfig, exist_ok=True)
    AutoModel.register(JinaBertConfig, JinaBertModel, exist_ok=True)
    AutoConfig.register(NomicBertMoeConfig.model_type, NomicBertMoeConfig, exist_ok=True)
    AutoModel.register(NomicBertMoeConfig, NomicBertMoeModel, exist_ok=True)
    AutoModelForSequenceClassification.register(JinaBertConfig, JinaBertForSequenceClassification, exist_ok=True)
