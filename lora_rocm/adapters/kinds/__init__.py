"""The kinds of adapters, one per file (LoRA, LoKr, LoHa, OFT, IA3), and the code that several of them share."""
