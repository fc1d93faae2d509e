"""What finetune.py adds: Hugging Face models, chat data, adapters, export."""
