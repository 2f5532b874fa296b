@echo off
rem Trains. Drop a recipe, a folder of images or another trainer's configuration.   train.bat RECIPE [options]
setlocal disabledelayedexpansion
set "LR_FILE=%~f0"
set "LR_DO=train"
set LR_ARGS=%*
"%~dp0_run.bat"
