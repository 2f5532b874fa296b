"""The kinds of adapters, one a file: LoRA, LoKr, LoHa, OFT, IA3; and what several of them share."""
