"""Pictures to the rows of patches that the vision tower takes: resize, normalize, cut. Knows no files and no tokens.

The reference's Pillow path: 8-bit bicubic resize; what each of the 256 values becomes, as the reference rounds it, is a
table, so that patches stay in 8 bits until they are where they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kestrel_cuda.backends.vision import PixelCodes
from kestrel_cuda.config import ImageProcessorConfig
from kestrel_cuda.inputs.image_size import ImageSize, image_size
from kestrel_cuda.inputs.pictures import Picture

_CHANNELS = 3


@dataclass(frozen=True)
class Patches:
    """Rows of (channel, frame, row, column), those of one token next to each other; `size` says how many of each."""

    pixels: PixelCodes
    size: ImageSize

    @property
    def pixel_values(self) -> NDArray[np.float32]:
        """What the reference's processor gives under this name."""
        return self.pixels.values_mk()


def image_patches(picture: Picture, rules: ImageProcessorConfig) -> Patches:
    """The patches of one picture. Raises InputError for one that is too long for its width."""
    size = image_size(picture.height, picture.width, rules, picture.path)
    resized = resize(picture.rgb, size)
    return Patches(cut([resized], size, rules, _values(rules)), size)


def resize(rgb: Image.Image, size: ImageSize) -> NDArray[np.uint8]:
    """The picture's pixels [height, width, channel] after the resize, still 8 bits each."""
    return np.asarray(rgb.resize((size.width, size.height), resample=Image.Resampling.BICUBIC))


def cut(
    frames_hwc: Sequence[NDArray[np.uint8]],
    size: ImageSize,
    rules: ImageProcessorConfig,
    values_cv: NDArray[np.float32],
) -> PixelCodes:
    """Patch rows of frames that have the size: as many as fill its temporal patches, or one for each of these.

    `values_cv` says what each of the 256 pixel values becomes in each channel.
    """
    grid_t, grid_h, grid_w = size.grid_thw
    merge, patch, num_frames = rules.merge_size, rules.patch_size, len(frames_hwc) // grid_t
    assert num_frames in (1, rules.temporal_patch_size)
    assert len(frames_hwc) == grid_t * num_frames
    blocks = (grid_h // merge, grid_w // merge, merge, merge)
    codes = np.empty((grid_t, *blocks, _CHANNELS, num_frames, patch, patch), np.uint8)
    for index, frame_hwc in enumerate(frames_hwc):
        cells = frame_hwc.reshape(grid_h // merge, merge, patch, grid_w // merge, merge, patch, _CHANNELS)
        group, slot = divmod(index, num_frames)
        codes[group, ..., slot, :, :] = cells.transpose(0, 3, 1, 4, 6, 2, 5)
    num_inputs = _CHANNELS * rules.temporal_patch_size * patch * patch
    return PixelCodes(codes.reshape(grid_t * grid_h * grid_w, -1), values_cv, num_inputs)


def _values(rules: ImageProcessorConfig) -> NDArray[np.float32]:
    """Scaled in float64, the rest in float32, as the reference does for pictures."""
    scaled = (np.arange(256, dtype=np.float64) * rules.rescale_factor).astype(np.float32)
    mean = np.array(rules.image_mean, np.float32)[:, None]
    deviation = np.array(rules.image_std, np.float32)[:, None]
    values: NDArray[np.float32] = (scaled[None, :] - mean) / deviation
    return values
