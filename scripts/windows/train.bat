@echo off
rem Trains. A recipe or a folder of images can be dropped onto this file.   train.bat RECIPE [options]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=train"
set LR_ARGS=%*
"%~dp0_run.bat"
