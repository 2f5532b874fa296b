"""``python -m lora_rocm``."""

from lora_rocm.entry import main

if __name__ == "__main__":
    main()
