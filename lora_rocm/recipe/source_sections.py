"""Sources of images as recipe sections: the options of a source, and the entries of ``data.sources``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_rocm.recipe.sections import (
    MAX_ITEMS,
    AddedLater,
    Batch,
    CaptionExtension,
    Colours,
    Columns,
    ControlPath,
    Crops,
    FolderOrBeside,
    Fraction,
    InputFile,
    InputFolder,
    Lengths,
    PathOrHubId,
    PathText,
    Repeats,
    Resolutions,
    Section,
    Tags,
    Weight,
)

CaptionFallback = Literal["filename", "folder", "trigger", "empty", "error"]


class SourceOptions(Section):
    """Options of a source of images. Under ``data`` they are the defaults of all sources."""

    resolution: Resolutions = Field(
        1024,
        description="Side in pixels of a square; all buckets have about its area. A list, such as [512, 768, 1024]: "
        "each image is seen once per epoch at each of these.",
    )
    frames: Annotated[Lengths, AddedLater()] = Field(
        1,
        description="Frames of a clip, from its first on. A sub-folder of numbered images is a clip; its caption file "
        "is next to it (walk.txt for the folder walk). A list, such as [17, 33]: each clip uses the longest length "
        "that it has frames for. 1: single images.",
    )
    repeats: Repeats = Field(1, description="Number of times that each image is seen per epoch.")
    loss_weight: Weight = Field(1.0, description="Factor by which the loss of each image is multiplied.")
    caption_extension: CaptionExtension = Field(
        ".txt",
        description="Extension of the caption files next to the images. A list, such as [.txt, .tags.txt, _2.txt]: "
        "each of these files of an image is one of its captions.",
    )
    caption_fallback: CaptionFallback = Field(
        "filename",
        description="Caption of an image without a caption file: its file name, the name of its folder, the trigger "
        "word, an empty text, or an error. The folder 10_zwx woman gives zwx woman, as in kohya's scripts.",
    )
    trigger_word: str | None = Field(
        None,
        description="Word that replaces [trigger] in captions and prompts. It is added in front of every caption that "
        "does not contain it.",
    )
    caption_prefix: str = Field("", description="Text added in front of every caption.")
    caption_suffix: str = Field("", description="Text added after every caption.")
    enable_wildcard: bool = Field(
        False,
        description="Read {a|b} in a caption as a or b, and each line of a caption as a separate caption. {{ and }} "
        "are braces.",
    )
    caption_tag_dropout_rate: Fraction = Field(
        0.0, description="Share of the comma-separated tags of a caption that are dropped."
    )
    shuffle_caption: bool = Field(False, description="Shuffle the comma-separated tags of a caption.")
    keep_tokens: Tags = Field(0, description="Number of tags at the front that are never shuffled or dropped.")
    caption_dropout_rate: Fraction = Field(0.0, description="Share of steps that see the empty caption.")
    flip_aug: bool = Field(
        False, description="Also train on mirrored images, which are cached and drawn half of the time."
    )
    random_crop: Crops = Field(
        False,
        description="Crop at a random place instead of the centre: one place per image, the same in each run. A number "
        "N: N such crops of each image, of which each step draws one. All are cached: N times the encoding time and "
        "disk space.",
    )
    color_aug: Colours = Field(
        0,
        description="A number N: cache N more versions of each image with slightly different colours (hue turned by up "
        "to 16 degrees, or gamma 0.95 to 1.05). Each step draws one. Encoding time and disk space: N + 1 times.",
    )
    recursive: bool = Field(True, description="Also read the sub-folders of a folder.")
    include: Annotated[tuple[PathText, ...], Field(max_length=MAX_ITEMS)] = Field(
        (), description="If given, use only images that match one of these patterns, written as for exclude."
    )
    exclude: Annotated[tuple[PathText, ...], Field(max_length=MAX_ITEMS)] = Field(
        (),
        description="Files and sub-folders to exclude: names, or paths below the folder with slashes. * matches "
        "anything, also slashes; case does not matter.",
    )
    metadata_file: InputFile | None = Field(
        None,
        description="A JSON file with captions in kohya's format: image names with caption and tags. The caption file "
        "of an image takes precedence.",
    )
    mask_path: FolderOrBeside | None = Field(
        None,
        description="A folder of masks with the names of the images. The loss counts white, ignores black, and counts "
        "grey in part. `beside`: the masks are with the images, as NAME-masklabel.png or in a sub-folder such as "
        "masks.",
    )
    alpha_mask: bool = Field(False, description="Take the alpha channel of each image as its mask.")
    unmasked_weight: Fraction = Field(
        0.0, description="Lowest weight of a place in the loss. Where the mask is darker, this weight is used."
    )
    control_path: ControlPath | None = Field(
        None,
        description="A folder of control images with the names of the images, for models that edit an image. The "
        "control image is the model's input, the image its target. `beside`: they are with the images, as "
        "NAME-condlabel.png or in a sub-folder such as _controls. For models that take several: a list of folders, or "
        "the same folder several times for control images named NAME_0, NAME_1 and so on.",
    )
    control_column: Annotated[Columns | None, AddedLater()] = Field(
        None,
        description="Column with the control image of each row of a dataset, in place of control_path: an image or a "
        "path, as in image_column. For models that take several: a list of columns.",
    )

    @property
    def lengths(self) -> tuple[int, ...]:
        """All frame counts that a clip can have."""
        return (self.frames,) if isinstance(self.frames, int) else self.frames

    @property
    def control_places(self) -> tuple[str, ...]:
        """Places that each have one control image per image: folders, ``BESIDE``, or ``control_columns``."""
        folders = (self.control_path,) if isinstance(self.control_path, str) else self.control_path or ()
        return *folders, *self.control_columns

    @property
    def control_columns(self) -> tuple[str, ...]:
        """Table columns with control images. A source with such columns has no other places for control images."""
        return (self.control_column,) if isinstance(self.control_column, str) else self.control_column or ()


class NamedSource(Section):
    """A folder or a ``datasets`` source without its own options: it uses the options of ``data``."""

    path: InputFolder | None = Field(None, description="A folder of images, with its sub-folders.")
    dataset: PathOrHubId | None = Field(
        None,
        description="A datasets source: hub id, Parquet file or folder, folder of images with a metadata file "
        "(imagefolder), or a folder written by save_to_disk.",
    )
    split: str = Field("train", description="Split of the dataset.")
    image_column: str = Field("image", description="Column with the image.")
    caption_column: str | None = Field(
        "text",
        description="Column with the caption, or with a list of captions; with path, a column of metadata.jsonl or "
        "metadata.csv next to the images.",
    )
    crop_column: PathText | None = Field(
        None,
        description="Column with the part of each image that is used, [x, y, width, height] in pixels of the upright "
        "image. This part is cropped to its bucket. With path: a column of the same files and of metadata_file.",
    )


OF_FOLDERS = ("caption_extension", "recursive", "include", "exclude")
"""Source options that apply only to the files of a folder."""
MAX_CLASS_IMAGES = 100_000
OPTIONS_OF_CLASS_IMAGES = ("resolution", "repeats", "loss_weight", "caption_dropout_rate", "flip_aug")
"""Source options that apply to class images, which the base generates."""
OF_VIDEOS = frozenset({"frames"})
"""Source options that only video families read."""
OF_TEXTS_TOO = frozenset({"path", "dataset", "split", "repeats", "loss_weight", "recursive", "include", "exclude"})
"""Source options that language models read too. All other options are about images."""
OF_CLASS_IMAGES = frozenset((*OPTIONS_OF_CLASS_IMAGES, "is_reg", "class_prompt", "num_class_images", "max_batch_size"))


class DataSource(NamedSource):
    """One source: a folder of images, or a ``datasets`` source. An option that is not set has its value in ``data``."""

    loss_weight_column: PathText | None = Field(
        None,
        description="Column with a loss factor for each image, multiplied by loss_weight: above 0, up to 1000. With "
        "path: a column of the same files and of metadata_file.",
    )
    is_reg: bool = Field(
        False,
        description="These are regularisation images: images of the class without the concept. An epoch uses as many "
        "of them as of the other images, and none is held out.",
    )
    class_prompt: PathText | None = Field(
        None,
        description="In place of path, with is_reg: the base draws the images before training from this prompt, which "
        "is also their caption. Sampler, steps, guidance and negative prompt come from sample.",
    )
    num_class_images: int = Field(
        100, gt=0, le=MAX_CLASS_IMAGES, description="Number of images of class_prompt. They stay in the cache."
    )
    max_batch_size: Batch | None = Field(
        None,
        description="A smaller train.batch_size for this source. Its samples are in separate batches, filled up with "
        "samples that do not count. A step takes the memory and time of train.batch_size.",
    )
    resolution: Resolutions | None = None
    frames: Lengths | None = None
    repeats: Repeats | None = None
    loss_weight: Weight | None = None
    caption_extension: CaptionExtension | None = None
    caption_fallback: CaptionFallback | None = None
    trigger_word: str | None = None
    caption_prefix: str | None = None
    caption_suffix: str | None = None
    enable_wildcard: bool | None = None
    caption_tag_dropout_rate: Fraction | None = None
    shuffle_caption: bool | None = None
    keep_tokens: Tags | None = None
    caption_dropout_rate: Fraction | None = None
    flip_aug: bool | None = None
    random_crop: Crops | None = None
    color_aug: Colours | None = None
    recursive: bool | None = None
    include: Annotated[tuple[PathText, ...], Field(max_length=MAX_ITEMS)] | None = None
    exclude: Annotated[tuple[PathText, ...], Field(max_length=MAX_ITEMS)] | None = None
    metadata_file: InputFile | None = None
    mask_path: FolderOrBeside | None = None
    alpha_mask: bool | None = None
    unmasked_weight: Fraction | None = None
    control_path: ControlPath | None = None
    control_column: Columns | None = None
