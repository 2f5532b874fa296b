@echo off
rem A prompt with .venv and the variables that training gets.   shell.bat [command to run there]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=shell"
set LR_ARGS=%*
"%~dp0_run.bat"
