"""Models that were not made for this project, each tiny and with random weights: nothing is downloaded.

    model, inputs = build("Llama")          # inputs: tensors by name, whose dimension 0 is the sample
    loss = MODELS["Llama"].loss(model, inputs)                   # a mean over the samples

Hugging Face's transformers and diffusers, a model with LoRA from peft, and modules of torch.nn. Those of timm are
missing: it imports torchvision, which has no build for this torch on a CPU.
"""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from simple_fsdp import unsharded

SAMPLES = 4
TOKENS = 8
VOCAB = 61
WIDTH = 32
Inputs = dict[str, torch.Tensor]


class Other(NamedTuple):
    """make() -> the model; inputs() -> a whole batch; loss(model, inputs) -> a scalar. per_slice: what the model makes
    of a sample depends on the other samples of its batch (batch norm), which on each rank are those of its slice."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[nn.Module, Inputs], torch.Tensor]
    per_slice: bool = False


def build(name: str) -> tuple[nn.Module, Inputs]:
    """The same model and batch at every call."""
    torch.manual_seed(1)
    model = MODELS[name].make()
    torch.manual_seed(2)
    return model, MODELS[name].inputs()


# ------------------------------------------------------------------------------------------------------- batches


def tokens() -> Inputs:
    return dict(input_ids=torch.randint(3, VOCAB, (SAMPLES, TOKENS)))  # below 3: padding and ends, for some models


def images() -> Inputs:
    return dict(pixel_values=torch.randn(SAMPLES, 3, 32, 32))


def with_target(inputs: Callable[[], Inputs], *shape: int) -> Callable[[], Inputs]:
    return lambda: inputs() | dict(target=torch.randn(SAMPLES, *shape))


def labels_of_images() -> Inputs:
    return images() | dict(labels=torch.randint(5, (SAMPLES,)))


def speech() -> Inputs:
    return dict(input_features=torch.randn(SAMPLES, 8, 16), labels=torch.randint(3, VOCAB, (SAMPLES, TOKENS)))


def noisy(**others: tuple) -> Callable[[], Inputs]:
    """What diffusion models take: a time for each sample, and tensors of these shapes."""

    def inputs() -> Inputs:
        return dict(timestep=torch.arange(SAMPLES) * 7.0) | {k: torch.randn(SAMPLES, *v) for k, v in others.items()}

    return inputs


# -------------------------------------------------------------------------------------------------------- losses


def own_loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(**inputs).loss


def next_token(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(**inputs, labels=inputs["input_ids"], use_cache=False).loss


def same_token(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return model(**inputs, labels=inputs["input_ids"]).loss


def distance(output: str) -> Callable[[nn.Module, Inputs], torch.Tensor]:
    """Of an output of the model, by its name, from the target."""

    def loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
        inputs = dict(inputs)
        target = inputs.pop("target")
        return F.mse_loss(getattr(model(**inputs), output), target)

    return loss


def clip_loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    out = model(**inputs)  # its own loss compares each sample with the others
    with unsharded():  # outside of forward
        return (1 - (out.image_embeds * out.text_embeds).sum(-1)).mean() * model.logit_scale.exp()


# ------------------------------------------------------------------------------------------------- Hugging Face


def hf(name: str, **config) -> Callable[[], nn.Module]:
    """A class of transformers by its name, with a configuration of its own. Evaluation mode: no dropout."""

    def make() -> nn.Module:
        cls = getattr(importlib.import_module("transformers"), name)
        return cls(cls.config_class(**config)).eval()

    return make


def causal(name: str, **config) -> Other:
    """A causal language model; most name their sizes alike."""
    shape = dict(hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCAB,
                 max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
    return Other(hf(name, **{k: v for k, v in (shape | config).items() if v is not None}), tokens, next_token)


def encoder(name: str, **config) -> Other:
    shape = dict(hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCAB,
                 max_position_embeddings=32)  # fmt: skip
    return Other(hf(name, **shape | config), tokens, same_token)


def vision(name: str, per_slice: bool = False, **config) -> Other:
    make = hf(name, num_labels=5, **config)
    return Other(lambda: make().train(per_slice), labels_of_images, own_loss, per_slice)


VIT = dict(hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=32,
           patch_size=8)  # fmt: skip
EXPERTS = dict(num_key_value_heads=2, num_experts_per_tok=2)


def small_llama() -> nn.Module:
    return causal("LlamaForCausalLM", num_key_value_heads=2).make()


def checkpointing_llama() -> nn.Module:
    """With attention in plain operations: torch 2.13 cannot compile its own on a CPU in a checkpoint of shards."""
    model = small_llama().train()  # it has no dropout
    model.set_attn_implementation("eager")
    model.activation_checkpointing_enable()
    return model


def lora_llama() -> nn.Module:
    """Its base is frozen."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    model = get_peft_model(small_llama(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zeros, with which the others have no gradient
            nn.init.normal_(p, std=0.1)
    return model


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = dict(hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCAB,
                max_position_embeddings=32, eos_token_id=2)  # fmt: skip
    return CLIPModel(CLIPConfig(text_config=text, vision_config=VIT, projection_dim=16)).eval()


# ---------------------------------------------------------------------------------------------------- diffusers


def diffuser(name: str, **config) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = getattr(importlib.import_module("diffusers"), name)(**config).eval()
        for p in model.parameters():  # some begin with zeros, behind which nothing has a gradient
            if not p.any():
                nn.init.normal_(p, std=0.1)
        return model

    return make


# ------------------------------------------------------------------------------------------------------ torch.nn


class TwoInputs(nn.Module):
    """torch.nn.Transformer, whose target sequence is its source."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 48, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.transformer(x, x.flip(1))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self, cls, **config):
        super().__init__()
        self.rnn = cls(WIDTH, WIDTH, num_layers=2, batch_first=True, **config)

    def forward(self, x):
        return self.rnn(x)[0]


class ConvNet(nn.Module):
    """Batch norm in training mode."""

    def __init__(self):
        super().__init__()
        widths = [3, 8, 12]
        layers = [(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
                  for a, b in zip(widths, widths[1:], strict=False)]  # fmt: skip
        self.features = nn.Sequential(*(nn.Sequential(*block) for block in layers))
        self.head = nn.Linear(widths[-1], WIDTH)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def sequence() -> Inputs:
    return dict(x=torch.randn(SAMPLES, TOKENS, WIDTH), target=torch.randn(SAMPLES, TOKENS, WIDTH))


def picture() -> Inputs:
    return dict(x=torch.randn(SAMPLES, 3, 16, 16), target=torch.randn(SAMPLES, WIDTH))


def plain_loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    return F.mse_loss(model(inputs["x"]), inputs["target"])


UNET = dict(sample_size=8, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4)
CROSS = dict(cross_attention_dim=WIDTH, attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D",),
             up_block_types=("CrossAttnUpBlock2D",))  # fmt: skip
LATENT = (4, 8, 8)


def dit_inputs() -> Inputs:
    return noisy(hidden_states=LATENT, target=LATENT)() | dict(class_labels=torch.arange(SAMPLES) % 5)


def flux_inputs() -> Inputs:
    inputs = noisy(hidden_states=(16, 16), encoder_hidden_states=(TOKENS, WIDTH), pooled_projections=(WIDTH,),
                   target=(16, 16))()  # fmt: skip
    return inputs | dict(timestep=inputs["timestep"] / 100)


def flux_loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    places = dict(txt_ids=torch.zeros(TOKENS, 3), img_ids=torch.cartesian_prod(*[torch.arange(4.0)] * 2, torch.ones(1)))
    return distance("sample")(model, inputs | places)


MODELS: dict[str, Other] = {
    "Llama": causal("LlamaForCausalLM", num_hidden_layers=2, num_key_value_heads=2),
    "Llama, checkpointing": Other(checkpointing_llama, tokens, next_token),
    "Llama, LoRA": Other(lora_llama, tokens, next_token),
    "Mistral": causal("MistralForCausalLM", num_key_value_heads=2, sliding_window=4),
    "Qwen2": causal("Qwen2ForCausalLM", num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=True),
    "Qwen3": causal("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=16),
    "Qwen3-MoE": causal("Qwen3MoeForCausalLM", **EXPERTS, num_experts=4, head_dim=8, moe_intermediate_size=16),
    "Mixtral": causal("MixtralForCausalLM", **EXPERTS, num_local_experts=3),
    "Gemma": causal("GemmaForCausalLM", num_key_value_heads=1, head_dim=8),
    "Gemma 2": causal("Gemma2ForCausalLM", num_hidden_layers=2, num_key_value_heads=2, head_dim=8, sliding_window=4),
    "Gemma 3": causal("Gemma3ForCausalLM", num_key_value_heads=2, head_dim=8, sliding_window=4),
    "GPT-2": causal("GPT2LMHeadModel", intermediate_size=None),
    "GPT-NeoX": causal("GPTNeoXForCausalLM"),
    "OPT": causal("OPTForCausalLM", ffn_dim=48, word_embed_proj_dim=16),
    "Bloom": causal("BloomForCausalLM", intermediate_size=None, n_layer=1, n_head=4),
    "Phi": causal("PhiForCausalLM"),
    "Falcon": causal("FalconForCausalLM", new_decoder_architecture=False),
    "Mamba": causal("MambaForCausalLM", num_attention_heads=None, state_size=4),
    "BERT": encoder("BertForMaskedLM"),
    "RoBERTa": encoder("RobertaForMaskedLM"),
    "DeBERTa": encoder("DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "DistilBERT": Other(hf("DistilBertForMaskedLM", dim=WIDTH, hidden_dim=48, n_layers=1, n_heads=4, vocab_size=VOCAB,
                           max_position_embeddings=32), tokens, same_token),
    "ALBERT": encoder("AlbertForMaskedLM", embedding_size=16),
    "T5": Other(hf("T5ForConditionalGeneration", d_model=WIDTH, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
                   vocab_size=VOCAB, decoder_start_token_id=0), tokens, next_token),
    "BART": Other(hf("BartForConditionalGeneration", d_model=WIDTH, encoder_layers=1, decoder_layers=1,
                     encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                     vocab_size=VOCAB, max_position_embeddings=32), tokens, next_token),
    "Whisper": Other(hf("WhisperForConditionalGeneration", d_model=WIDTH, encoder_layers=1, decoder_layers=1,
                        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
                        vocab_size=VOCAB, num_mel_bins=8, max_source_positions=8, max_target_positions=16,
                        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1), speech, own_loss),
    "Wav2Vec2": Other(hf("Wav2Vec2ForSequenceClassification", hidden_size=WIDTH, num_hidden_layers=1, num_labels=5,
                         num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16), conv_stride=(5, 4),
                         conv_kernel=(10, 4), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4),
                      lambda: dict(input_values=torch.randn(SAMPLES, 400), labels=torch.arange(SAMPLES) % 5), own_loss),
    "ViT": vision("ViTForImageClassification", **VIT),
    "DeiT": vision("DeiTForImageClassification", **VIT | dict(num_hidden_layers=2)),
    "DINOv2": vision("Dinov2ForImageClassification", **VIT | dict(intermediate_size=None)),
    "CLIP": Other(clip, lambda: tokens() | images(), clip_loss),
    "Swin": vision("SwinForImageClassification", image_size=32, patch_size=4, embed_dim=16, depths=[1, 1],
                   num_heads=[2, 4], window_size=4),
    "ConvNeXt": vision("ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    "ResNet": vision("ResNetForImageClassification", per_slice=True, embedding_size=8, hidden_sizes=[8, 16],
                     depths=[1, 1], layer_type="basic"),
    "SegFormer": Other(hf("SegformerForSemanticSegmentation", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
                          hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2],
                          mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=5),
                       lambda: images() | dict(labels=torch.randint(5, (SAMPLES, 32, 32))), own_loss),
    "UNet2D": Other(diffuser("UNet2DModel", **UNET, down_block_types=("AttnDownBlock2D",),
                             up_block_types=("UpBlock2D",), attention_head_dim=8),
                    noisy(sample=(3, 8, 8), target=(3, 8, 8)), distance("sample")),
    "UNet2DCondition": Other(diffuser("UNet2DConditionModel", **UNET, **CROSS),
                             noisy(sample=LATENT, encoder_hidden_states=(TOKENS, WIDTH), target=LATENT),
                             distance("sample")),
    "AutoencoderKL": Other(diffuser("AutoencoderKL", block_out_channels=(8,), norm_num_groups=4, sample_size=16,
                                    latent_channels=4),
                           lambda: dict(sample=(x := torch.randn(SAMPLES, 3, 16, 16)), target=x), distance("sample")),
    "DiT": Other(diffuser("DiTTransformer2DModel", num_attention_heads=4, attention_head_dim=8, in_channels=4,
                          num_layers=1, sample_size=8, norm_num_groups=4, num_embeds_ada_norm=5),
                 dit_inputs, distance("sample")),
    "SD3": Other(diffuser("SD3Transformer2DModel", sample_size=8, patch_size=2, in_channels=4, num_layers=1,
                          attention_head_dim=8, num_attention_heads=4, joint_attention_dim=WIDTH, out_channels=4,
                          caption_projection_dim=WIDTH, pooled_projection_dim=WIDTH, pos_embed_max_size=16),
                 noisy(hidden_states=LATENT, encoder_hidden_states=(TOKENS, WIDTH), pooled_projections=(WIDTH,),
                       target=LATENT), distance("sample")),
    "Flux": Other(diffuser("FluxTransformer2DModel", in_channels=16, num_layers=1, num_single_layers=1,
                           attention_head_dim=16, num_attention_heads=2, joint_attention_dim=WIDTH,
                           pooled_projection_dim=WIDTH, axes_dims_rope=(4, 4, 8)), flux_inputs, flux_loss),
    "nn.Transformer": Other(TwoInputs, sequence, plain_loss),
    "nn.MultiheadAttention": Other(SelfAttention, sequence, plain_loss),
    "nn.LSTM": Other(lambda: Recurrent(nn.LSTM), sequence, plain_loss),
    "nn.GRU": Other(lambda: Recurrent(nn.GRU, bidirectional=True), lambda: sequence() | dict(
        target=torch.randn(SAMPLES, TOKENS, 2 * WIDTH)), plain_loss),
    "nn.Conv2d, BatchNorm2d": Other(ConvNet, picture, plain_loss, per_slice=True),
}  # fmt: skip
