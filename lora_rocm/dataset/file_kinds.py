"""Recognises by name the files in a data folder that are not training images. The tables are data.

There are three kinds: images in unsupported formats, files that commonly accompany images (captions, caches, settings),
and masks and control images that other trainers store next to their images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from lora_rocm.recipe.schema import SourceOptions

AS_USUAL = "Save them as PNG or JPEG."


@dataclass(frozen=True)
class UnreadFormat:
    """An unsupported format.

    name: in the plural. suffixes: its extensions, in lower case.
    fix: advice for the user. plugin: the package that adds the format to Pillow, if there is one.
    """

    name: str
    suffixes: tuple[str, ...]
    fix: str = AS_USUAL
    plugin: str = ""


UNREAD_FORMATS = (
    UnreadFormat("HEIC images", (".heic", ".heif", ".hif", ".heics", ".heifs"), plugin="pillow-heif"),
    UnreadFormat("JPEG XL images", (".jxl",), plugin="pillow-jxl-plugin"),
    UnreadFormat(
        "AVIF images", (".avif", ".avifs"), "Reinstall Pillow from its own wheels, which read AVIF, or save as PNG."
    ),
    UnreadFormat(
        "raw camera images",
        tuple(
            ".3fr .arw .cr2 .cr3 .crw .dcr .dng .erf .fff .gpr .iiq .kdc .mef .mos .mrw .nef .nrw .orf .pef .raf .raw "
            ".rw2 .rwl .sr2 .srf .srw .x3f".split()
        ),
        "Develop them, and export PNG or JPEG.",
    ),
    UnreadFormat(
        "drawings and documents",
        tuple(
            ".ai .afphoto .clip .cdr .eps .kra .mdp .ora .pdf .pdn .procreate .ps .psb .sai .sai2 .svg .svgz .wmf .emf "
            ".xcf".split()
        ),
        "Export them as PNG.",
    ),
    UnreadFormat(
        "videos",
        tuple(".3gp .avi .flv .gifv .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .vob .webm .wmv .apv".split()),
        "Export single frames as PNG.",
    ),
    UnreadFormat("archives", tuple(".7z .bz2 .gz .rar .tar .tgz .xz .zip .zst".split()), "Unpack them."),
    UnreadFormat(
        "images in rare formats",
        tuple(".bpg .cur .dcx .exr .fit .fits .flif .hdr .icns .jng .jxr .pcd .pict .pct .wdp .xbm .xpm".split()),
    ),
)

# Files that other programs leave in data folders. They are ignored without a notice.
HARMLESS_SUFFIXES = frozenset(
    # captions and lists; trainers' caches and weights; settings, notes, scripts; files of operating systems and cameras
    ".txt .caption .captions .tags .cap .json .jsonl .csv .tsv .parquet .arrow .xml .xmp .aae .thm "
    ".npz .npy .safetensors .sft .pt .pth .ckpt .bin .onnx .gguf .pkl .h5 .lmdb .mdb .db .sqlite .cache .lock "
    ".yaml .yml .toml .ini .cfg .conf .md .rst .log .html .htm .py .ipynb .sh .bat .ps1 .cmd .js .css "
    ".lnk .url .webloc .tmp .part .crdownload .bak .mp3 .wav .flac .m4a .ogg".split()
)
HARMLESS_NAMES = frozenset(("thumbs.db", "desktop.ini", "icon\r", "license", "readme", "makefile", "notice"))
CAPTION_SUFFIXES = (".txt", ".caption", ".captions", ".tags", ".cap")


@dataclass(frozen=True)
class Companion:
    """A kind of image that other trainers store next to training images.

    what: its name in messages, in the plural.
    key: the key of ``data`` that names their folder, where the recipe has one.
    stem_ends: endings of a file name, before the extension, that mark a companion.
    folders: names of sub-folders that hold only companions.
    paired_folders: ordinary names of sub-folders. A file in one is a companion if an image elsewhere has the same name.
    """

    what: str
    key: str
    stem_ends: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    paired_folders: tuple[str, ...] = ()

    @property
    def unused(self) -> str:
        """The reason why they are not used."""
        has_key = self.key in SourceOptions.model_fields
        return f"data.{self.key} does not name their folder" if has_key else "training with them is not supported yet"


# OneTrainer: -masklabel, -condlabel. ai-toolkit: _controls, and folders set by mask_path and control_path. kohya's
# scripts, diffusion-pipe, musubi-tuner: user-chosen folders whose files have the names of the images.
COMPANIONS = (
    Companion(
        "masks",
        "mask_path",
        stem_ends=("-masklabel",),
        folders=("_mask", "_masks"),
        paired_folders=("mask", "masks", "alpha mask", "alpha masks", "alpha_mask", "alpha_masks", "masklabels"),
    ),
    Companion(
        "control images",
        "control_path",
        stem_ends=("-condlabel",),
        folders=("_control", "_controls"),
        paired_folders=(
            *("control", "controls", "control_images", "control images", "controlnet", "condition", "conditions"),
            *("conditioning", "conditioning_data", "conditioning_images", "conditioning images", "cond"),
        ),
    ),
)


@dataclass(frozen=True)
class CompanionMatch:
    """The companion that a name stands for. ``paired``: only if an image elsewhere has the same name."""

    companion: Companion
    paired: bool


def companion_match(relative: str) -> CompanionMatch | None:
    """The companion that a path stands for. ``relative``: to the source's folder, with slashes."""
    folder, _, name = relative.lower().rpartition("/")
    stem = name.rpartition(".")[0]
    for companion in COMPANIONS:
        if stem.endswith(companion.stem_ends):
            return CompanionMatch(companion, paired=False)
    return _folder_match(folder) if folder else None


@lru_cache(maxsize=1024)
def _folder_match(folder: str) -> CompanionMatch | None:
    names = set(folder.split("/"))
    for companion in COMPANIONS:
        if not names.isdisjoint(companion.folders):
            return CompanionMatch(companion, paired=False)
    for companion in COMPANIONS:
        if not names.isdisjoint(companion.paired_folders):
            return CompanionMatch(companion, paired=True)
    return None


@cache
def unread_format(suffix: str) -> UnreadFormat | None:
    """The unsupported format of an extension (".heic", lower case); None if it is not in UNREAD_FORMATS."""
    return next((found for found in UNREAD_FORMATS if suffix in found.suffixes), None)


def is_harmless(name: str, suffix: str) -> bool:
    """Whether a file that is not an image is ignored without a notice."""
    return suffix in HARMLESS_SUFFIXES or name.lower() in HARMLESS_NAMES
