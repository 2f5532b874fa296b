@echo off
rem Trains a LoRA on the tiny base model that ships with the package.
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=demo"
set LR_ARGS=%*
"%~dp0_run.bat"
