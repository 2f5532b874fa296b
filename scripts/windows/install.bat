@echo off
rem Makes .venv ready, with the torch for this machine; safe to run again.   install.bat [--dev] [--repair] [--upgrade]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=install"
set LR_ARGS=%*
"%~dp0_run.bat"
