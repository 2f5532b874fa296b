"""A script in the style of TRL's examples."""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

rate = 1e-4
tokenizer = AutoTokenizer.from_pretrained("another/tokenizer")
model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-0.6B",
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
)
dataset = load_dataset("json", data_files="rows.jsonl", split="train")
args = SFTConfig(
    output_dir="out",
    max_length=None,
    learning_rate=rate,
    num_train_epochs=0.5,
    lr_scheduler_type="cosine_with_min_lr",
    lr_scheduler_kwargs={"min_lr": 1e-5},
    per_device_train_batch_size=2 * 2,
    adam_beta2=0.95,
    completion_only_loss=True,
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=dataset,
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], layers_to_transform=[0, 1]),
    formatting_func=lambda row: row["text"],
)
trainer.train()
