@echo off
rem Draws images with a LoRA.   sample.bat RUN_FOLDER_OR_LORA --prompt "a cat"
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=sample"
set LR_ARGS=%*
"%~dp0_run.bat"
