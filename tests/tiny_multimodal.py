"""Tiny random-weight multimodal models with a byte tokenizer; none needs torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    BatchFeature,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessorPil,
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    WhisperFeatureExtractor,
)
from transformers.processing_utils import ProcessorMixin, VideosKwargs

from tests.tiny import EOS, VOCAB_SIZE, save_tokenizer

PLACEHOLDER = "<image>"
"""What stands for an image or a sound in a prompt."""
PLACEHOLDER_ID = 320
"""A multiple of 64: vLLM pads a vocabulary to one, and padding would hide a token too many."""
VIDEO_PLACEHOLDER = f"<unused{PLACEHOLDER_ID - 1}>"

VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}


def save_idefics3(directory: Path, *, knows_image_token: bool = True) -> Path:
    """An Idefics 3: a Llama with tiles of an image, four embeddings each, amid text.

    Without ``knows_image_token`` the placeholder's id lies outside of the Llama's vocabulary.
    """
    torch.manual_seed(3)
    tokenizer = multimodal_tokenizer(directory)
    config = Idefics3Config(
        vision_config=VISION,
        text_config={**TEXT, "vocab_size": PLACEHOLDER_ID + knows_image_token},
        image_token_id=PLACEHOLDER_ID,
        scale_factor=2,
        pad_token_id=0,
    )
    Idefics3ForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
    )
    Idefics3Processor(images, tokenizer, image_seq_len=4).save_pretrained(directory)
    return directory


def save_paddleocr_vl(directory: Path) -> Path:
    """A PaddleOCR-VL: an Ernie 4.5 with M-RoPE, so positions after an image lag behind."""
    torch.manual_seed(4)
    tokenizer = multimodal_tokenizer(directory)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = PaddleOCRVLConfig(
        vision_config={**VISION, "spatial_merge_size": 2},
        text_config={**TEXT, "vocab_size": PLACEHOLDER_ID + 1, "rope_parameters": rope},
        image_token_id=PLACEHOLDER_ID,
        tie_word_embeddings=False,
    )
    PaddleOCRVLForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    images = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 56 * 56, "longest_edge": 224 * 224}
    )
    PaddleOCRVLProcessor(images, tokenizer).save_pretrained(directory)
    return directory


def save_qwen2_audio(directory: Path) -> Path:
    """A Qwen2-Audio, which hears 25 embeddings a second."""
    torch.manual_seed(5)
    tokenizer = multimodal_tokenizer(directory)
    audio = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 64,
    }
    config = Qwen2AudioConfig(
        audio_config=audio,
        text_config={**TEXT, "vocab_size": PLACEHOLDER_ID + 1, "tie_word_embeddings": False},
        audio_token_index=PLACEHOLDER_ID,
    )
    Qwen2AudioForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    # transformers 5.19 saves a "model." more than the published checkpoints have.
    [file] = directory.glob("*.safetensors")
    weights = load_file(file)
    save_file({name.replace("model.model.", "model.", 1): weights[name] for name in weights}, file)
    hearing = WhisperFeatureExtractor(feature_size=16)
    Qwen2AudioProcessor(hearing, tokenizer, audio_token=PLACEHOLDER).save_pretrained(directory)
    return directory


def save_qwen2_vl(directory: Path) -> Path:
    """A Qwen2-VL, which sees videos, with M-RoPE. vLLM has to read it by `FramesProcessor`."""
    torch.manual_seed(6)
    tokenizer = multimodal_tokenizer(directory)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2}
    config = Qwen2VLConfig(
        vision_config={**vision, "initializer_range": 0.15},
        text_config={**TEXT, "vocab_size": PLACEHOLDER_ID + 1, "rope_parameters": rope},
        image_token_id=PLACEHOLDER_ID,
        video_token_id=PLACEHOLDER_ID - 1,
        tie_word_embeddings=False,
    )
    Qwen2VLForConditionalGeneration(config).to(torch.float32).save_pretrained(directory)
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 224 * 224})
    FramesProcessor(images, tokenizer).save_pretrained(directory)
    return directory


class FramesProcessor(Qwen2VLProcessor):
    """Qwen2-VL's, with a reader of videos that does without torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, **options: Any) -> None:
        self.image_token = PLACEHOLDER
        self.image_token_id = PLACEHOLDER_ID
        self.video_token = VIDEO_PLACEHOLDER
        self.video_token_id = PLACEHOLDER_ID - 1
        # Past Qwen2VLProcessor, which wants a reader of videos of transformers' own.
        ProcessorMixin.__init__(self, image_processor, tokenizer, **options)
        self.video_processor = Frames()


class Frames:
    """Cuts videos into patches as `Qwen2VLVideoProcessor` does, without resizing them.

    The pixels stay 0 to 255, since vLLM's model normalizes them itself.
    """

    patch_size = 14
    temporal_patch_size = 2
    merge_size = 2
    valid_kwargs = VideosKwargs

    def __call__(self, videos: list[np.ndarray], **_: Any) -> BatchFeature:
        """Patches of each video of shape (frames, height, width, 3), in an order of squares."""
        across = self.merge_size * self.patch_size
        patches, grids = [], []
        for video in videos:
            frames, height, width, _ = video.shape
            pixels = torch.tensor(video, dtype=torch.float32)
            squares = pixels.reshape(
                frames // self.temporal_patch_size,
                self.temporal_patch_size,
                height // across,
                self.merge_size,
                self.patch_size,
                width // across,
                self.merge_size,
                self.patch_size,
                3,
            )
            ordered = squares.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
            patches.append(ordered.flatten(0, 4).flatten(1))
            spatial = height // self.patch_size, width // self.patch_size
            grids.append([frames // self.temporal_patch_size, *spatial])
        data = {"pixel_values_videos": torch.cat(patches), "video_grid_thw": torch.tensor(grids)}
        return BatchFeature(data)


def multimodal_tokenizer(directory: Path) -> Any:
    """The byte tokenizer with Idefics 3's special tokens, the placeholder last (and far out)."""
    save_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    special = ["<fake_token_around_image>", "<end_of_utterance>"]
    special += [f"<unused{i}>" for i in range(VOCAB_SIZE + len(special), PLACEHOLDER_ID)]
    tokenizer.add_tokens([*special, PLACEHOLDER], special_tokens=True)
    tokenizer.save_pretrained(directory)
    return PreTrainedTokenizerFast.from_pretrained(
        directory, extra_special_tokens={"image_token": PLACEHOLDER, "audio_token": PLACEHOLDER}
    )


def random_audio(seconds: float, seed: int = 0) -> tuple[np.ndarray, int]:
    """Noise, and its sampling rate."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=int(seconds * 16000)).astype(np.float32), 16000


def random_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured noise."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, size=(height, width, 3), dtype=np.uint8))


def random_video(frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """Coloured noise of shape (frames, height, width, 3)."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, size=(frames, height, width, 3), dtype=np.uint8)
